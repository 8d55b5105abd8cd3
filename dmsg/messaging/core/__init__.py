"""Rules of the Messaging System without I/O: the modules process received bytes, and return events and bytes to
send."""
