"""Messages of the bus: their bytes, signatures and encryption."""
