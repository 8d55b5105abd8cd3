"""dmsg connections, frames and transports (the protocol of 2019)."""
