"""The reliable message bus: twins, relays that federate, peers and clients."""
