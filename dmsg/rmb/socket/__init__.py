"""The websockets of the bus: messages, confirmations, who is held."""
