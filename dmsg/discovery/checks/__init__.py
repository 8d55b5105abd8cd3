"""Checks of listed servers: which checks are made, when, and how much load they may put on others."""
