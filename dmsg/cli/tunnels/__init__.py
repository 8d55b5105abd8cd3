"""Commands that carry TCP connections through streams: ``dmsg forward``, ``expose`` and ``socks``."""
