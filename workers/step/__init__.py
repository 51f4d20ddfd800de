"""What one training step consists of."""
