"""Nameplates: short numbers for keys that somebody is to be told by voice.

A nameplate is a number that leads to a key for some minutes.  Nothing in it is secret, and nobody need believe it: who
takes a number for the wrong key finds out by the words of the code (``docs/protocol/word-codes.md``).
"""
