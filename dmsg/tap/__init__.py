"""Options and makeService of the twistd plugins."""
