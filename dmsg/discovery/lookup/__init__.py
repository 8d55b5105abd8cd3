"""The client of a discovery, and of several."""
