"""Entries and nameplates, and the rules for accepting and replacing them. No I/O."""
