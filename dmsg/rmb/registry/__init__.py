"""Registries, which store each twin's key and relays: in memory, in a file, at an HTTP service, or on a blockchain."""
