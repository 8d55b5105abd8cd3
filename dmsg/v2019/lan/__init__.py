"""Connections to peers on the same local network without discovery or server. Peers are found by the number of a
code."""
