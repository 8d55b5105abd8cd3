"""Whom a stream leads to, and why it ended."""

from __future__ import annotations

from attrs import frozen
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IAddress
from zope.interface import implementer

from dmsg.errors import CloseReason, DmsgError, DmsgTimeout, as_close_reason, close_reason_text
from dmsg.keys import PubKey


@implementer(IAddress)
@frozen
class DmsgAddress:
    """The address of a client: its public key, and the port that somebody listens on.

    Port 0 is the one of transports that name none: those of 2019.
    """

    public_key: PubKey
    port: int = 0

    def __str__(self) -> str:
        return f"dmsg:{self.public_key}:{self.port}" if self.port else f"dmsg:{self.public_key}"


class StreamLost(ConnectionLost, DmsgError):
    """The stream was closed for a reason other than that it was done.

    :ivar close_reason: a :class:`~dmsg.errors.CloseReason`, or the byte of the CLOSE frame where it is none of them.
    """

    def __init__(self, close_reason: int) -> None:
        super().__init__(close_reason_text(close_reason))
        self.close_reason = as_close_reason(close_reason)

    def __str__(self) -> str:
        # Twisted's own would speak of "a non-clean fashion" before it
        return close_reason_text(self.close_reason)


class StreamTimeout(StreamLost, DmsgTimeout):
    """A deadline passed: :meth:`~dmsg.StreamTransport.setDeadline` and the like."""

    def __init__(self, text: str) -> None:
        super().__init__(CloseReason.TIMEOUT)
        self.args = (text,)
        self._text = text

    def __str__(self) -> str:
        return self._text
