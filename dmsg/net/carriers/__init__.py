"""Carriers: protocols that wrap the connection of a client and a server, such as a websocket on the port of a web
server.
"""
