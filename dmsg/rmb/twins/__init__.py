"""Twins: addresses, keys, registry entries and tokens."""
