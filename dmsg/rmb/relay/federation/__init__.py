"""Federation: messages to other relays."""
