"""The controller's process: the loop around the decisions, and what it writes down."""
