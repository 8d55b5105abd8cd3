"""Addresses of streams, and the errors with which streams end."""

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
    """Address of a client: its public key and a port.

    Port 0 stands for transports of 2019, which have no port.
    """

    public_key: PubKey
    port: int = 0

    @classmethod
    def of(cls, remote: PubKey | DmsgAddress, port: int = 0) -> DmsgAddress:
        """Return the address that the arguments of ``connect(remote, factory, port)`` mean.

        :raises TypeError: ``port`` is not an int. In versions before 0.2, this argument was the timeout.
        :raises ValueError: ``port`` is not 0 to 65535, or ``remote`` is an address with another port.
        """
        # A bool is refused: Python treats it as an int, but a bool as a port is a mistake of the caller.
        if isinstance(port, bool) or not isinstance(port, int):
            raise TypeError(f"port is an int, not {type(port).__name__}; pass a timeout as timeout=SECONDS")
        if not 0 <= port < 65536:
            raise ValueError(f"port must be from 0 to 65535, not {port}")
        if not isinstance(remote, DmsgAddress):
            return cls(remote, port)
        if port and port != remote.port:
            raise ValueError(f"the address names port {remote.port}, the argument {port}")
        return remote

    @property
    def host(self) -> str:
        """Public key as a host name (:attr:`~dmsg.PubKey.text`). Web frameworks expect an attribute of this name."""
        return self.public_key.text

    @property
    def text(self) -> str:
        """Address in the form that people use and commands accept: ``KEY:PORT`` with the key in 53 characters, or only
        ``KEY`` without a port."""
        return f"{self.host}:{self.port}" if self.port else self.host

    @property
    def short(self) -> str:
        """First 8 hexadecimal digits of the key, and the port unless it is 0, for logs and errors."""
        return f"{self.public_key.short}:{self.port}" if self.port else self.public_key.short

    def __str__(self) -> str:
        return f"dmsg:{self.public_key}:{self.port}" if self.port else f"dmsg:{self.public_key}"


class StreamLost(ConnectionLost, DmsgError):
    """Error: the stream was closed for another reason than normal completion.

    :ivar close_reason: a :class:`~dmsg.errors.CloseReason`, or the number in the CLOSE frame if no member has this
        value.
    """

    def __init__(self, close_reason: int) -> None:
        super().__init__(close_reason_text(close_reason))
        self.close_reason = as_close_reason(close_reason)

    def __str__(self) -> str:
        # The base class would put the words "a non-clean fashion" before the reason.
        return close_reason_text(self.close_reason)


class StreamTimeout(StreamLost, DmsgTimeout):
    """Error: a deadline of the stream has passed, such as the one set by :meth:`~dmsg.StreamTransport.setDeadline`."""

    def __init__(self, text: str) -> None:
        super().__init__(CloseReason.TIMEOUT)
        self.args = (text,)
        self._text = text

    def __str__(self) -> str:
        return self._text
