"""The command line apart from `elastic run` and what belongs to it (elastic/cli.py)."""
