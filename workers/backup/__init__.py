"""Copies of a rank's rows in other processes' memory."""
