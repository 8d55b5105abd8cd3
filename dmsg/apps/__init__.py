"""Applications over any stream, without a command line: files, copies, listings, SOCKS."""
