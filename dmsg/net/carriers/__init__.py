"""Carriers: protocols such as a websocket, inside which a client connects to a server where plain TCP does not work."""
