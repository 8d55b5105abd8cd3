"""Rules of the Messaging System without I/O: modules take bytes, and return events and bytes to send."""
