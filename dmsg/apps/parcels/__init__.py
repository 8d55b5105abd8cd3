"""Parcels: files and directories, a text, or the output of a program, which one side offers and the other may accept.

``manifest`` describes the content of a parcel, ``destination`` the directory that it is written to, and ``wire`` the
messages.  ``sender`` and ``receiver`` are the two sides.  ``docs/protocol/word-codes.md`` is the specification.
"""
