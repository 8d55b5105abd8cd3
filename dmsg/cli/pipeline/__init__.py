"""``dmsg analytics``: the pipeline, its tables and its answers."""
