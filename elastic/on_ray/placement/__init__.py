"""Where workers can be: machines, what may still come, what will go."""
