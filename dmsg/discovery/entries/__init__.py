"""What entries and nameplates are, and by which rules they are taken and replaced.  No I/O."""
