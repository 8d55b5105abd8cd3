"""Session of a twin's program: registers the twin, signs and encrypts messages, and keeps connections to relays."""
