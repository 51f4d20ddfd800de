"""All that the processes of a run say: a frozen dataclass each, one union per direction.

The first frame on every connection is `hello.Hello`. What a frame is in bytes is wire.py's.
"""
