"""Discovery service: its routes, limits, status page and events."""
