"""Websockets without I/O (RFC 6455): upgrade requests and frames, for the message bus and for links."""
