"""Entries and nameplates of discovery, and the rules by which they are accepted and replaced. No I/O."""
