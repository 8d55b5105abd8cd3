"""Two programs with one key, each of which posts the entry of that key."""

from __future__ import annotations

from collections.abc import Callable

CONTESTED_POSTS = 3
"""How often an entry that another program replaced is posted again within ``CONTESTED_TIME``."""
CONTESTED_TIME = 600.0
"""Seconds."""


class Contest:
    """Two programs with one key replace each other's entry: how often this one answers.

    :param now: seconds of a monotonic clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._posts: list[float] = []

    def lost(self) -> bool:
        """The entry was replaced: whether it is not to be posted again for now."""
        now = self._now()
        self._posts = [at for at in self._posts if at > now - CONTESTED_TIME]
        if len(self._posts) >= CONTESTED_POSTS:
            return True
        self._posts.append(now)
        return False
