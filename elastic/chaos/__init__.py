"""`elastic chaos`: faults put into a live run from outside, and the report of what they cost."""
