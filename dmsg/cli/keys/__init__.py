"""Commands about keys, names and what discovery knows of them."""
