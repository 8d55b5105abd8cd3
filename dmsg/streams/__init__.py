"""Secure streams, which outlive the transports that carry them; independent of the protocol family."""
