"""The protocol of 2019 without I/O: bytes in, bytes and events out."""
