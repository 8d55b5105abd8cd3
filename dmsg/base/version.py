"""Version of the installed program."""

from __future__ import annotations

from functools import cache


@cache
def program_version() -> str:
    """Return the version of dmsg. The first call takes some milliseconds, because it imports modules."""
    # Entities that never show their version then do not import these 20 modules.
    from importlib.metadata import version

    return version("dmsg")
