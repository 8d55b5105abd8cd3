"""What the network did, computed on Spark from the events that its entities wrote.

Needs the extra ``spark`` and Java 17 or 21.  Of dmsg it uses
:mod:`dmsg.telemetry.schema` and nothing else.
"""
