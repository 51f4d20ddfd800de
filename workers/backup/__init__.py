"""Copies of a rank's shard in other processes' memory."""
