"""One module per strategy that spreads the model over ranks, behind one interface."""
