"""Command group ``dmsg analytics``: runs the data pipeline, maintains its tables, and answers questions from them."""
