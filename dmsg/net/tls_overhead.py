"""Limit of the bytes that a TLS peer sends in addition to its data. This module does not import OpenSSL, because that
takes a tenth of a second.

A TLS peer can send messages that carry no data, such as KeyUpdate or requests to renegotiate, which a server refuses.
Such a message has about 30 bytes and costs the server 8 us, a hundred times as much per byte as data. OpenSSL processes
all messages of one read before the protocol above gets any data. It answers some of them, and limits neither their
number nor the answers that are queued for a peer that does not read.
"""

from __future__ import annotations

from zope.interface import Interface

MAX_OVERHEAD = 32 * 1024
"""Maximum number of bytes that a TLS peer may send in addition to its data. An incomplete record counts as well, with
up to 17 KiB.
"""
RECORD_OVERHEAD = 96
"""Number of bytes that each record may have in addition to its data. AES-256-CBC with SHA-384 needs 85."""


class ITLSOverhead(Interface):
    """Interface of a protocol above TLS that ends its own connection when the peer exceeds ``MAX_OVERHEAD``."""

    def tls_overhead_exceeded() -> None:
        """Count the reason, and end the connection at once."""


class OverheadAccount:
    """Account of the bytes of one TLS connection that carry no data.

    :ivar level: number of bytes received. Each record of data reduces the number by the size of the data and by
        ``RECORD_OVERHEAD``, but not below 0.
    """

    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 0

    def receive(self, size: int) -> None:
        """Count bytes of TLS that arrived."""
        self.level += size

    def deliver(self, size: int) -> None:
        """Count the user data of one TLS record."""
        level = self.level - size - RECORD_OVERHEAD
        self.level = max(0, level)

    @property
    def is_exceeded(self) -> bool:
        """Whether the peer has sent too many bytes that are not data."""
        return self.level > MAX_OVERHEAD
