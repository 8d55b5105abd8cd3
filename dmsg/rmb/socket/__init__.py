"""Websockets of the bus: messages, confirmations, and holding of sessions."""
