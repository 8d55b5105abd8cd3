"""Basic building blocks without I/O that any other package may import."""
