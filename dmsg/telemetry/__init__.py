"""What the entities count about themselves."""
