"""What applications hold: streams, as Twisted transports, and endpoints for them."""
