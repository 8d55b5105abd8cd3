"""Stores of entries: SQLite in memory or in a file, or Redis, behind one interface.

Each store checks and replaces an entry in one transaction, by the rules of
:func:`dmsg.discovery.entries.rules.decide_post`; in Redis a script implements them. Several discovery processes can
share a file, or a Redis. The caller verifies entries and passes the time as an argument.

Strangers can create any number of keys. So the size of a store is limited, in all and for each address block from which
entries are posted (a *place*). Every entry expires unless it is posted again.
"""
