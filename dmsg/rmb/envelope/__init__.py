"""Messages of the bus: their encoding, signatures and encryption."""
