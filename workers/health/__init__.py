"""What a worker finds out about itself and tells: signs of life, hangs, notices, bad numbers."""
