"""Twins: addresses, keys, registry entries, tokens."""
