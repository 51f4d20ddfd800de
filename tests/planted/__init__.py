"""The bugs that tests/mutations.py plants."""
