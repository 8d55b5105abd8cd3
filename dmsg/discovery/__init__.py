"""The REST service and client that say which key is reached through which servers."""
