"""Direct links: connections between two clients, which carry streams in the same way as a connection to a server."""
