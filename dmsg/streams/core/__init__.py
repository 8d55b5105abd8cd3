"""Rules of secure streams without I/O: handshake, ciphers, windows, resumption."""
