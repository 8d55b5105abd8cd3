"""What other relays send: verified, then accepted."""
