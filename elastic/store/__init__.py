"""Durable things over `pyarrow.fs`: atomic writes, the journal, the run directory."""
