"""Secure streams, which outlive the transports that carry them. Independent of the protocol family."""
