"""Status page of an entity: one live page, beside its metrics."""
