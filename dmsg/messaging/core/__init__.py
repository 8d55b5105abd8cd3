"""The Messaging System without I/O: bytes in, bytes and events out."""
