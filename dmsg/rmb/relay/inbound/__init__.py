"""Messages that other relays bring: verified, then accepted."""
