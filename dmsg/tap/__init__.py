"""Plugins of twistd: their options and their makeService."""
