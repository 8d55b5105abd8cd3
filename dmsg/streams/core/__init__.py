"""Protocol rules of secure streams without I/O: handshake, encryption, windows and resumption."""
