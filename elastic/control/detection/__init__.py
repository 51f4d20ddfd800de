"""Which worker is at fault: hangs, desyncs, partitions, stragglers. Pure."""
