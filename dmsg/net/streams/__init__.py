"""Streams as Twisted transports, and endpoints for them."""
