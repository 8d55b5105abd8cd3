"""Parsers and tables, and bytes that look for a way to break them."""
