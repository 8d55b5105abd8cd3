"""What all sessions of one client of 2019 share: its streams, and which transports it takes from others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IProtocolFactory, IReactorTime

from dmsg.base.fair_rate import FairRate
from dmsg.clients.handshake_limits import HandshakeLimits
from dmsg.errors import CloseReason
from dmsg.keys import PubKey, SecKey
from dmsg.net.streams.stream import StreamTransport
from dmsg.streams.carrier import ClientStream
from dmsg.streams.core.budget import Budget
from dmsg.streams.probes import Probes
from dmsg.streams.streams import Streams
from dmsg.streams.timeouts import RESUME_TIMEOUT
from dmsg.v2019.core.receipts_kept import KeptReceipts
from dmsg.v2019.core.wire import INSTANCE_SIZE

LOOK_UP_RATE, LOOK_UP_BURST = 20.0, 100.0
"""Initiators of plain REQUESTs that discovery is asked for in a second, and at once; servers, and below them
initiators, share them.  Discovery counts these questions against the address of this client, who would pay for the
strangers."""


class Encryption(Enum):
    """What a client asks of its transports."""

    REQUIRE = "require"
    """Secure ones only, in both directions."""
    PREFER = "prefer"
    """Secure ones with clients whose signed entry offers them, those of 2019 with the rest."""
    OFF = "off"
    """Those of 2019, which servers can read."""


class TransportStreams(Streams):
    """The streams of one client over transports of 2019.

    :param factory: returns the factory that listens on a port, or None.
    :param factories: returns all factories that listen.
    :param receipts: whether to sign for servers that ask for it what they have delivered.
    :param reconnect: see :class:`~dmsg.streams.streams.Streams`.
    :param features_of: returns the features in the signed entry of a client.
    :param is_known: returns whether these features are known without asking discovery.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        key: SecKey,
        factory: Callable[[int], IProtocolFactory | None],
        schedule: Callable[[StreamTransport], None],
        *,
        encryption: Encryption = Encryption.REQUIRE,
        resume_timeout: float = RESUME_TIMEOUT,
        budget: Budget | None = None,
        receipts: bool = False,
        factories: Callable[[], Iterable[IProtocolFactory]] = tuple,
        reconnect: Callable[[ClientStream], Deferred[None]] | None = None,
        features_of: Callable[[PubKey], Deferred[frozenset[str]]] | None = None,
        is_known: Callable[[PubKey], bool] = lambda remote: False,
    ) -> None:
        super().__init__(reactor, key, schedule, resume_timeout=resume_timeout, budget=budget, reconnect=reconnect)
        self.doorman = HandshakeLimits(reactor.seconds, factories)
        self.probes = Probes(reactor)
        """Takes the streams that only measure."""
        self.instance = os.urandom(INSTANCE_SIZE)
        """Bytes by which servers tell this program from another one with the same key."""
        self.receipts = receipts
        self.kept_receipts = KeptReceipts()
        """Receipts of transports whose connection was lost, for the next connection to their server."""
        self.factory = factory
        self.encryption = encryption
        self.features_of = features_of
        self.is_known = is_known
        self._look_ups = FairRate()
        self.asking = 0
        """Number of initiators of plain REQUESTs that are being looked up."""
        self.refused: Counter[CloseReason] = Counter()
        """Transports of others that were refused or given up, by reason."""

    @property
    def secure_key(self) -> SecKey | None:
        """The key with which sessions take secure transports; None: they do not."""
        return None if self.encryption is Encryption.OFF else self.key

    def may_look_up(self, server: PubKey, initiator: PubKey) -> bool:
        """Whether discovery may be asked for the initiator of a plain REQUEST; counts the question when it may.

        :param server: through which the REQUEST came: it may have made up the initiator.
        """
        if self.is_known(initiator):
            return True
        return self._look_ups.take((server, initiator), LOOK_UP_RATE, LOOK_UP_BURST, self._reactor.seconds())
