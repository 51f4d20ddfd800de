"""Checkpoints from the workers' side: written, loaded, compared, brought to other formats."""
