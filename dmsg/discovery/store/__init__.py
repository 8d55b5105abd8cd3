"""Stores of entries, with one interface: SQLite in memory or in a file, and Redis.

Each store checks and replaces an entry in one transaction, by the rules of
:func:`dmsg.discovery.entries.rules.decide_post`; in Redis a script implements these rules. Several discovery processes
can share a file or a Redis. The caller verifies entries, and passes the time as an argument.

Strangers can create any number of keys. So there is a limit for the size of the whole store, and one for each *place*:
the address block from which entries were posted. Every entry expires unless it is posted again.
"""
