"""What can be seen of runs from outside, by their files: lists, reports, shares of time, traces."""
