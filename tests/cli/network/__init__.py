"""Tests of ``dmsg host``, ``join`` and ``leave``."""
