"""Commands that transfer files."""
