"""Websockets without I/O (RFC 6455): requests to become one, and frames. For the message bus and for links."""
