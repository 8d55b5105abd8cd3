"""A twin's session: how it starts, what it seals and opens, its connections to relays."""
