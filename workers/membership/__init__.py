"""A worker's side of generations: joining, leaving, and its link to the controller."""
