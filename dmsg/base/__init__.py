"""Small parts without I/O that anything may use."""
