"""Data pipeline on Spark: computes tables about the network from the events that its entities wrote.

Needs the extra ``spark`` and Java 17 or 21. The only part of dmsg that this package imports,
apart from :mod:`dmsg.errors`, is :mod:`dmsg.telemetry.schema`.
"""
