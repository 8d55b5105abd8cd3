"""Websockets of the bus: transport of messages, their confirmation by pings, and back-pressure."""
