"""Actors that read a run's data ahead, and the workers' client."""
