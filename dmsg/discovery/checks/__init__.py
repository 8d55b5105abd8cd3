"""Checks of listed servers: which are made, when, and how much they may ask of others."""
