"""Commands for operators of a fleet, the servers of one operator: ``dmsg top``."""
