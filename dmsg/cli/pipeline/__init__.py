"""Command group ``dmsg analytics``: runs the pipeline, maintains its tables, and answers questions from them."""
