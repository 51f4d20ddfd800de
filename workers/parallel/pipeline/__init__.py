"""A model in stages: which blocks make a chain, and what a stage does with the user's own code."""
