"""How gradients are summed over micro-batches and ranks."""
