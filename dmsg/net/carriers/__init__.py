"""Carrier protocols, inside which a client and a server connect, such as a websocket on the port of a web server."""
