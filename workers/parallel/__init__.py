"""Strategies that spread the model over ranks, behind one interface (strategy.py)."""
