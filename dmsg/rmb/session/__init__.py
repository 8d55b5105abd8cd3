"""Session of a twin: its start, the sealing and opening of messages, its connections to relays."""
