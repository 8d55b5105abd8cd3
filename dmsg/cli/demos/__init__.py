"""Commands such as ``dmsg demo``, which run whole networks on this machine for demonstration."""
