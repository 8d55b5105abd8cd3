"""HTTP at both ends: sites and what guards them, fetching and its limits."""
