"""Decisions as pure functions: (ledger, phase, event, limits) -> decision. No clock, no I/O."""
