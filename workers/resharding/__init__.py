"""Shards of a state move to their new owners."""
