"""The Messaging System, the protocol before dmsg: links, frames, channels."""
