"""Commands for operators of a fleet."""
