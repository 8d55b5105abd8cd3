"""Multicast DNS on the networks of this machine, reduced to questions with a single answer."""
