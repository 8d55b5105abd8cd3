"""Queues of a relay, which store messages for sessions that are slow or not connected."""
