"""What the driver and terminals do on Ray: submit a run, find one, tell how it goes."""
