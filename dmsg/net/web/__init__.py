"""HTTP servers and clients with limits."""
