"""What a tensor is on this rank: its strides, its part of a whole."""
