"""Discovery service: HTTP routes, rate limits, status page, telemetry events, and the entity that combines them."""
