"""Who is gone or hangs, as far as a controller must ask for it."""
