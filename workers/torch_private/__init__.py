"""What torch keeps private and we use: every name of it, behind the one check of version.py.

FSDP2's, and those of sharded optimizers, are in workers/parallel/fsdp2_private, behind the same
check. tests/test_architecture.py knows of no other place.
"""
