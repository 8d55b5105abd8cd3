"""Peer: gateway between the bus and a twin's local services and clients, which exchange JSON messages over Redis."""
