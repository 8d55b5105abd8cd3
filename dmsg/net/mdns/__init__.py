"""Multicast DNS in one question and one answer, on the networks of this machine."""
