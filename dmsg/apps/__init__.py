"""Applications over streams, without a command line: file transfer, copies, directory listings, SOCKS."""
