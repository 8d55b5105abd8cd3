"""``dmsg rmb`` and ``dmsg twin``: the message bus."""
