"""Reception of messages that other relays send to this relay: verifies them, then accepts them."""
