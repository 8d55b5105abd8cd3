"""Addresses of messages: the number of a twin, and the name of one of its sessions."""

from __future__ import annotations

from typing import NamedTuple

MAX_TWIN = 2**32 - 1
MAX_SID = 256
"""Maximum length of a session's name in characters."""
STREAM_PREFIX = "stream:"


class Session(NamedTuple):
    """Address of a session: the number of a twin, and the name under which one of the twin's programs is connected.

    :ivar twin: number of the twin, 1 to 2**32-1; 0 stands for no twin.
    :ivar sid: name of the session. None is the unnamed session, which differs from a session with an empty name.
    """

    twin: int
    sid: str | None = None

    def __str__(self) -> str:
        return f"{self.twin}" if self.sid is None else f"{self.twin}:{self.sid}"

    @property
    def stream(self) -> str:
        """Key of the session's queue in Redis."""
        return f"{STREAM_PREFIX}{self}"

    @classmethod
    def parse(cls, text: str) -> Session:
        """Parse ``TWIN`` or ``TWIN:SID``; a prefix ``stream:`` is ignored.

        :raises ValueError: the text has neither form, or the name is too long.
        """
        twin, colon, sid = text.removeprefix(STREAM_PREFIX).partition(":")
        if not (twin.isascii() and twin.isdigit()) or int(twin) > MAX_TWIN:
            raise ValueError(f"{text[:80]!r} is not TWIN or TWIN:SESSION")
        if len(sid) > MAX_SID:
            raise ValueError(f"session {sid[:40]!r}... has more than {MAX_SID} characters")
        return cls(int(twin), sid if colon else None)
