"""Federation: forwarding of messages to the other relays of their receivers."""
