"""Tests that run the commands and programs of README and docs as they stand there."""
