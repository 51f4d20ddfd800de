"""Process groups of a generation, and how their members meet."""
