"""Commands that lead TCP through streams."""
