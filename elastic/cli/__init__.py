"""The terminal: `elastic ...`."""
