"""Everything that touches torch's private names for FSDP2 and optimizers; one version check."""
