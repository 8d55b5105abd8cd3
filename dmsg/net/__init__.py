"""Twisted plumbing that knows no protocol family: noise links, streams, endpoints."""
