"""Queues of a relay, which store messages for sessions that are not connected or slow."""
