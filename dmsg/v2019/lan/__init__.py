"""Connections to peers on the same local network, which are found by the number of a code, without discovery or
server."""
