"""Commands such as ``dmsg demo``, which demonstrate whole networks on one machine."""
