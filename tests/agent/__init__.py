"""The agent and its programs."""
