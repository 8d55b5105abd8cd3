"""Numbers with their units, for people."""

from __future__ import annotations


def human_size(size: float) -> str:
    """As in ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def milliseconds(seconds: float) -> str:
    """As in ``1.23 ms``."""
    return f"{seconds * 1000:.2f} ms"
