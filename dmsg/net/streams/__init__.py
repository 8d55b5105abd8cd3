"""Streams as Twisted transports, and Twisted endpoints that open and accept streams."""
