"""Codes: a few words that two people say to each other instead of keys.

``words`` is what they say, ``pake`` proves that both know it, ``stream`` does that over a stream.
``docs/protocol/word-codes.md`` is the specification.
"""
