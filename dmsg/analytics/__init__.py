"""Data pipeline on Spark: computes tables about the network from the events that its entities wrote.

Needs the extra ``spark`` and Java 17 or 21. Apart from itself, this package imports only :mod:`dmsg.errors`,
``dmsg.directory_checks``, :mod:`dmsg.telemetry.schema` and :mod:`dmsg.telemetry.spool_listing` of dmsg.
"""
