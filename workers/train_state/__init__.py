"""The state that trains: model, optimizer, counters; built, serialised, hashed."""
