"""Parcels: files and directories, a text, or whatever a program writes, offered to one peer who may take it.

``manifest`` is what a parcel has, ``place`` where it comes to be, ``wire`` what both sides say, ``sender`` and
``receiver`` are the two sides.  ``docs/protocol/word-codes.md`` describes the messages.
"""
