"""What belongs to other relays."""
