"""``dmsg demo`` and its like: whole networks on this machine."""
