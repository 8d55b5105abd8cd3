"""Carriers: what the connection of a client and a server lies in, such as a websocket on the port of a web server."""
