"""Registries of twins: in memory, in a file, at a service over HTTP, on a chain."""
