"""Copies of shards in the memory of other machines; how they are read back: workers/parallel."""
