"""Discovery: the REST service that stores which servers each key is connected to, and a client of this service."""
