"""Commit in place: a script whose model is in DistributedDataParallel goes on after a loss."""
