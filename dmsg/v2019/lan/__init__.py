"""Peers on the same network, found by the number of a code and reached without discovery or server."""
