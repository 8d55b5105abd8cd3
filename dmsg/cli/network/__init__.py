"""``dmsg host``, ``join`` and ``leave``: networks of one's own, and those of others."""
