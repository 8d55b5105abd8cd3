"""Peer: gateway of a twin to the network, for services and clients that speak JSON over Redis."""
