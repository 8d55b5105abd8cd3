"""Limit of the bytes that a TLS peer sends beside its data. OpenSSL is not imported, because that takes a tenth of a
second.

A peer may send messages of TLS that carry no data, such as KeyUpdate or a renegotiation, which a server refuses. A
message has about 30 bytes and costs the server 8 us, a hundred times as much per byte as data. OpenSSL processes all
that came in one read before the protocol above gets anything, and answers some of them. It does not limit their number,
nor the answers that wait for a peer who does not read.
"""

from __future__ import annotations

from zope.interface import Interface

MAX_OVERHEAD = 32 * 1024
"""Maximum number of bytes that a TLS peer may send beside its data. An incomplete record counts as overhead, up to
17 KiB.
"""
RECORD_OVERHEAD = 96
"""Number of bytes beside its data that each record may have. AES-256-CBC with SHA-384 needs 85."""


class ITLSOverhead(Interface):
    """Interface of a protocol above TLS that ends its own connection when the peer exceeds ``MAX_OVERHEAD``."""

    def tls_overhead_exceeded() -> None:
        """Count the reason, and end the connection at once."""


class OverheadAccount:
    """Account of one connection.

    :ivar level: number of bytes received. Each record of data reduces it by the size of the data and by
        ``RECORD_OVERHEAD``, but not below 0.
    """

    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 0

    def receive(self, size: int) -> None:
        """Count bytes of TLS that arrived."""
        self.level += size

    def deliver(self, size: int) -> None:
        """Count the data of one record."""
        level = self.level - size - RECORD_OVERHEAD
        self.level = max(0, level)

    @property
    def is_exceeded(self) -> bool:
        """Whether the peer has sent too much beside its data."""
        return self.level > MAX_OVERHEAD
