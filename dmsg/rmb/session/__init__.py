"""Session of a twin's program: registers the twin, seals and opens messages, and keeps connections to relays."""
