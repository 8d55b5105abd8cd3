"""Rules of dmsg's protocol without I/O, for servers and clients: process received bytes, and return events and bytes to
send."""
