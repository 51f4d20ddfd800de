"""The user's process: launches a run, waits for it, and tells how it ended."""
