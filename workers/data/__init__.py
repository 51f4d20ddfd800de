"""A worker's micro-batches: loaded by its own processes, or cut out of what the feed reads."""
