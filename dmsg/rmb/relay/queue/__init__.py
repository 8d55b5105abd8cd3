"""Queues of a relay: messages kept for sessions that are away."""
