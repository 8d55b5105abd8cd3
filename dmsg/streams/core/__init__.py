"""The part of secure streams that does no I/O: handshake, ciphers, windows, resumption."""
