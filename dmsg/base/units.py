"""Formatting of numbers with units, for people."""

from __future__ import annotations


def human_size(size: float) -> str:
    """Format a number of bytes, for example as ``1.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def milliseconds(seconds: float) -> str:
    """Format a duration in milliseconds, for example as ``1.23 ms``."""
    return f"{seconds * 1000:.2f} ms"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun, for example as ``1 file`` or ``1,200 files``.

    :param noun: singular of a noun whose plural ends in ``s``.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def human_count(number: float) -> str:
    """Format a count, for example as ``950``, ``12.3 k`` or ``4.5 M``. A number below 100 that is not whole gets one
    decimal place."""
    if number < 1000:
        return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
    for unit in ("k", "M"):
        number /= 1000
        if number < 1000:
            return f"{number:.1f} {unit}"
    return f"{number / 1000:.1f} G"


def human_time(seconds: float) -> str:
    """Format a duration in one or two units, for example as ``12 s``, ``5 min``, ``3 h 12 min`` or ``2 d 4 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"
