"""Commands that carry files."""
