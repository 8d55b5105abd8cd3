"""dmsg: two programs talk when all they know of each other is a public key."""
