"""Secure streams that outlive their transports, for any family."""
