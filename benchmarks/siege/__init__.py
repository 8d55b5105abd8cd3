"""Entities under attack, and what those feel who have nothing to do with it."""
