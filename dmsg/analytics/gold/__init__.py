"""Transformation of silver into gold tables.  Each module answers a group of questions; each function computes one
table from others."""
