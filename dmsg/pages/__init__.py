"""What an entity shows of itself: one page, live, beside its metrics."""
