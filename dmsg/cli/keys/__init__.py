"""Commands about keys, names and their entries in discovery."""
