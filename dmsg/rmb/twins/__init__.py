"""Who twins are: addresses, keys, entries of the registry, tokens."""
