"""A user's own training script, run as it is: its process group, its reports, its restarts."""
