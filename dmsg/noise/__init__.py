"""The Noise handshake and its records, without I/O."""
