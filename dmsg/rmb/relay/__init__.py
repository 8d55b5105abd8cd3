"""Relay of the message bus: decides where each message goes, and delivers, stores or forwards it."""
