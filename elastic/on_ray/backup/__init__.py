"""Servers of peer memory, and whether it protects the run."""
