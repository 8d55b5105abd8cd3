"""Commands ``dmsg rmb`` and ``dmsg twin``, for the message bus."""
