"""Connections with a handshake, and then frames: over Noise, or as they are."""
