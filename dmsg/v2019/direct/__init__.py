"""Direct links: connections between two clients, over which streams run as over a server's connection."""
