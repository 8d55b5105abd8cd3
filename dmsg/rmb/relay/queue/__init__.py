"""What a relay keeps for sessions that are away."""
