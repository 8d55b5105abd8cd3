"""Noise handshakes of links and transports, and the encrypted records of links, without I/O."""
