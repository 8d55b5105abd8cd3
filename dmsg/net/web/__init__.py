"""HTTP servers and clients that limit the memory and time that the other side can cost."""
