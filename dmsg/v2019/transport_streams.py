"""State that all sessions of one client of the protocol family v2019 share: its streams, limits, and receipts that are
not delivered yet."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocolFactory, IReactorTime

from dmsg.base.cipher_names import Cipher
from dmsg.base.fair_rate import FairRate
from dmsg.base.timeouts import CLOSE_TIMEOUT, RESUME_TIMEOUT
from dmsg.clients.handshake_limits import HandshakeLimits
from dmsg.errors import CloseReason
from dmsg.keys import PubKey, SecKey
from dmsg.net.deadlines import wait_until
from dmsg.net.streams.stream import StreamTransport
from dmsg.streams.carrier import ClientStream
from dmsg.streams.core.budget import Budget
from dmsg.streams.probes import Probes
from dmsg.streams.streams import Streams
from dmsg.v2019.core.receipts_kept import KeptReceipts
from dmsg.v2019.core.wire import INSTANCE_SIZE
from dmsg.v2019.reachability import ReachabilityCheck

LOOK_UP_RATE, LOOK_UP_BURST = 20.0, 100.0
"""Rate limit, as look-ups per second and burst. A plain REQUEST makes this client look up the initiator's entry. The
rate is shared fairly among the servers, and then among the initiators at each server. Look-ups count towards this
client's rate limit at discovery, so strangers must not be able to cause many."""
CLOSING_CHECK_INTERVAL = 0.02
"""Seconds between checks whether the closing streams of a stopping client have finished."""


class Encryption(Enum):
    """Policy of a client for the encryption of its transports."""

    REQUIRE = "require"
    """Use secure transports only, in both directions."""
    PREFER = "prefer"
    """Use secure transports with clients whose signed entry offers them, and plain ones with all others."""
    OFF = "off"
    """Use plain transports only, as in 2019. Servers can read their data."""


class TransportStreams(Streams):
    """Streams of one client over transports of 2019, and the state that the client's sessions share.

    :param factory: returns the factory that listens on a port, or None.
    :param factories: returns all factories that listen.
    :param cipher: cipher that this client prefers for its transports.
    :param receipts: whether to sign receipts for servers that request them.
    :param reconnect: see :class:`~dmsg.streams.streams.Streams`.
    :param features_of: returns the features in the signed entry of a client.
    :param is_known: returns whether the features of a client are known without a request to discovery.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecKey,
        factory: Callable[[int], IProtocolFactory | None],
        schedule: Callable[[StreamTransport], None],
        *,
        encryption: Encryption = Encryption.REQUIRE,
        cipher: Cipher = Cipher.CHACHA20_POLY1305,
        resume_timeout: float = RESUME_TIMEOUT,
        budget: Budget | None = None,
        receipts: bool = False,
        factories: Callable[[], Iterable[IProtocolFactory]] = tuple,
        reconnect: Callable[[ClientStream], Deferred[None]] | None = None,
        features_of: Callable[[PubKey], Deferred[frozenset[str]]] | None = None,
        is_known: Callable[[PubKey], bool] = lambda remote: False,
    ) -> None:
        super().__init__(reactor, key, schedule, resume_timeout=resume_timeout, budget=budget, reconnect=reconnect)
        self.handshake_limits = HandshakeLimits(reactor.seconds, factories)
        self.probes = Probes(reactor)
        """Factory for probes: streams of other clients that only measure round trips."""
        self.instance = os.urandom(INSTANCE_SIZE)
        """Random bytes by which servers distinguish this program from another program with the same key."""
        self.receipts = receipts
        self.kept_receipts = KeptReceipts()
        """Receipts of transports whose connection was lost, for the next connection to their server."""
        self.reachability: dict[PubKey, ReachabilityCheck] = {}
        """Checks of the lasting connections to servers that may be of 2019, by server."""
        self.factory = factory
        self.encryption = encryption
        self.prefers_aes = cipher is Cipher.AES_256_GCM
        """Whether to offer and accept AES-256-GCM for transports."""
        self.features_of = features_of
        self.is_known = is_known
        self._look_ups = FairRate()
        self.asking = 0
        """Number of look-ups of initiators of plain REQUESTs that are in progress."""
        self.refused: Counter[CloseReason] = Counter()
        """Number of incoming transports that were refused or evicted, by reason."""

    @property
    def secure_key(self) -> SecKey | None:
        """Secret key with which sessions accept secure transports; None if encryption is off."""
        return None if self.encryption is Encryption.OFF else self.key

    def may_look_up(self, server: PubKey, initiator: PubKey) -> bool:
        """Return whether discovery may be asked for the entry of the initiator of a plain REQUEST. If so, count the
        look-up.

        :param server: server through which the REQUEST came. The server may have invented the initiator.
        """
        if self.is_known(initiator):
            return True
        return self._look_ups.take((server, initiator), LOOK_UP_RATE, LOOK_UP_BURST, self._reactor.seconds())


async def let_close(reactor: IReactorTime, streams: Callable[[], Iterable[ClientStream]]) -> None:
    """Wait until closing streams have sent their data, at most ``CLOSE_TIMEOUT`` seconds. For TCP, the kernel does this
    after a program has ended."""
    await wait_until(
        reactor,
        lambda: not any(one.disconnecting and not one.has_ended for one in streams()),
        CLOSE_TIMEOUT,
        CLOSING_CHECK_INTERVAL,
    )
