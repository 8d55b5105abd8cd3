"""Commands that carry TCP connections through streams."""
