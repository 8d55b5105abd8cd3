"""Status page of an entity (server, discovery, relay and so on), on the same port as the entity's metrics. The page
updates itself."""
