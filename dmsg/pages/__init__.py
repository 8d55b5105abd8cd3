"""Status page of an entity (server, discovery, relay and so on): one page that updates itself, on the port of the
metrics."""
