"""Commands that carry TCP connections over streams: ``dmsg forward``, ``expose`` and ``socks``."""
