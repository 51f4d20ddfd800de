"""Rows of a sharded state move to their new owners."""
