"""The reliable message bus."""
