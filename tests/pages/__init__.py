"""Tests of the pages on which entities show their state."""
