"""Commands for operators of a fleet of entities: ``dmsg top``."""
