"""What can be seen of runs from outside, by their files: lists, shares of a step's time, traces."""
