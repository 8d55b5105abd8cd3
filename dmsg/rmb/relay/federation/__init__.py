"""Federation: forwarding of messages to other relays, whose twins receive them."""
