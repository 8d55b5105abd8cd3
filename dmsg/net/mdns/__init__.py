"""Multicast DNS on the networks of this machine, reduced to one question with one answer."""
