"""The relay of the bus: its decisions about messages, and their execution."""
