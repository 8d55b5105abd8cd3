"""Entry of messages that other relays send to this one: verifies them, then accepts them."""
