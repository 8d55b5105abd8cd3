"""Commands ``dmsg host``, ``dmsg join`` and ``dmsg leave``: run a network, or use one that somebody else runs."""
