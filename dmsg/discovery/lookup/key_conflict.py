"""Limit on POSTs for the case that two programs with the same key replace each other's entry."""

from __future__ import annotations

from collections.abc import Callable

CONFLICT_POSTS = 3
"""Maximum number of POSTs within ``CONFLICT_TIME`` that restore an entry which another program has replaced."""
CONFLICT_TIME = 600.0
"""Length in seconds of the window in which ``CONFLICT_POSTS`` is counted."""


class KeyConflict:
    """Limit on the POSTs that restore this program's entry after another program with the same key has replaced it.

    Without this limit, the two programs would replace each other's entry for ever.

    :param now: monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._posts: list[float] = []

    def note_replaced(self) -> bool:
        """Record that another program has replaced the entry. Return True if the limit is reached; the caller then does
        not post the entry again for now.
        """
        now = self._now()
        self._posts = [at for at in self._posts if at > now - CONFLICT_TIME]
        if len(self._posts) >= CONFLICT_POSTS:
            return True
        self._posts.append(now)
        return False
