"""A lab for programs that build on dmsg: networks in memory and in network namespaces, and faults by name."""
