"""Fuzzing of parsers and tables with bytes that are meant to break them."""
