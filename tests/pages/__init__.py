"""What entities show of themselves."""
