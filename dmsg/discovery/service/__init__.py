"""The discovery service: its routes, limits, pages and events."""
