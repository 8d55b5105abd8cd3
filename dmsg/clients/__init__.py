"""What a client of any family does with discovery and servers: find, stay, be found."""
