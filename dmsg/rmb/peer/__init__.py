"""The gateway of a twin: services and clients speak JSON over Redis, the peer speaks for them to the network."""
