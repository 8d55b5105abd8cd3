"""Websockets of the bus: transport of messages, their confirmation with pings, and pausing of sessions."""
