"""Error of the pipeline's tables."""

from __future__ import annotations


class LakeError(Exception):
    """Error: the tables cannot be used. Its text says why."""
