"""Rules of the protocol of 2019 without I/O: modules take bytes, and return events and bytes to send."""
