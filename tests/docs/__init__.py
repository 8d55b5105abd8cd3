"""What README and docs show is run as it stands."""
