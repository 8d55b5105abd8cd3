"""HTTP servers and clients that limit the memory and time that untrusted peers can use."""
