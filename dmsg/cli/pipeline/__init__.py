"""Commands ``dmsg analytics``: the pipeline, its tables, and questions to them."""
