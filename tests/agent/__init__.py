"""Tests of the agent and of its programs."""
