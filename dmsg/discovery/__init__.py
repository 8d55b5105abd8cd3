"""Discovery: the REST service that says through which servers a key is reached, and its client."""
