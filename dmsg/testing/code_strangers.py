"""Stranger in walks: guesses codes of transfers, occupies the port of a sender, and intercepts streams.

The stranger knows the keys of all senders, and discovery may direct receivers to the stranger. The stranger knows no
code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from dmsg.apps.codes import Code
from dmsg.apps.codes.pake import CONFIRM, ELEMENT_SIZE, HEAD_SIZE, MAC_SIZE, PAKE, WRONG, Agreement, Role
from dmsg.apps.codes.stream import PORT, CodeAgreement, CodeEnd
from dmsg.errors import DmsgError
from dmsg.keys import PubKey
from dmsg.net.streams.address import DmsgAddress
from dmsg.net.streams.transports import stream_of
from dmsg.testing.code_programs import OfferRecord
from dmsg.testing.lab import Lab

NAME = "eve"
GUESSES = ("guess", "guess", "several guesses")
MANY, SILENT = "eight guesses", "silence"
VISITS = (*GUESSES, MANY, "part of a message", "confirmation first", "garbage", SILENT)
"""Kinds of visits of a stranger to the sender of a code."""
STREAMS = {MANY: 8, SILENT: 10}
"""Number of streams for each kind of visit with more than one stream. The numbers exceed the guesses that are allowed,
and the silent streams that a sender serves at the same time."""
FROM_SENDER = HEAD_SIZE + 1 + ELEMENT_SIZE + HEAD_SIZE
"""Maximum bytes that a sender sends before it knows that the other end has the code: its messages PAKE and WRONG."""
FROM_RECEIVER = HEAD_SIZE + 1 + ELEMENT_SIZE + HEAD_SIZE + MAC_SIZE
"""Maximum bytes that a receiver sends before it knows that the other end has the code: its messages PAKE and
CONFIRM."""


def _message(kind: int, body: bytes) -> bytes:
    return bytes((kind,)) + len(body).to_bytes(2, "big") + body


class Visit(Protocol):
    """Stream from an attacker (a stranger) to the sender of a code.

    :param broken: function that is called with the text of a broken guarantee.
    """

    def __init__(self, kind: str, record: OfferRecord, random: Random, broken: Callable[[str], object]) -> None:
        self._kind = kind
        self._record = record
        self._random = random
        self._broken = broken
        self._agreement: Agreement | None = None
        self._answer = bytearray()
        self._size = 0

    def connectionMade(self) -> None:
        stream = stream_of(self)
        peer, host, binding = stream.getPeer(), stream.getHost(), stream.binding
        assert isinstance(peer, DmsgAddress) and isinstance(host, DmsgAddress) and binding is not None
        wrong = Code.make(self._record.code.nameplate)
        agreement = Agreement(
            Role.RECEIVER, wrong.password, local=host.public_key, remote=peer.public_key, binding=binding
        )
        hello = agreement.data_to_send()
        if self._kind in (*GUESSES, MANY):
            self._agreement = agreement
            self._record.attempts += 1
            stream.write(hello)
        elif self._kind == "part of a message":
            stream.write(hello[: self._random.randrange(1, len(hello))])
        elif self._kind == "confirmation first":
            stream.write(_message(CONFIRM, self._random.randbytes(MAC_SIZE)) + hello)
        elif self._kind == "garbage":
            stream.write(self._random.randbytes(100_000))

    def dataReceived(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > FROM_SENDER:
            self._broken(f"a sender has sent {self._size} bytes to a stranger without the code")
        self._answer += data
        while len(self._answer) >= HEAD_SIZE:
            size = HEAD_SIZE + int.from_bytes(self._answer[1:HEAD_SIZE], "big")
            if len(self._answer) < size:
                return
            message = bytes(self._answer[:size])
            del self._answer[:size]
            self._take(message)

    def _take(self, message: bytes) -> None:
        stream = stream_of(self)
        if message[0] == WRONG:
            self._record.verdicts += 1
        elif message[0] == CONFIRM:
            self._broken("a sender has confirmed the code to a stranger")
        elif message[0] == PAKE and self._agreement is not None:
            self._agreement.receive_data(message)
            guess = self._agreement.data_to_send()
            if self._kind == "several guesses":
                guess += b"".join(_message(CONFIRM, self._random.randbytes(MAC_SIZE)) for _ in range(3))
            stream.write(guess)


class _Relayed(Protocol):
    """Stranger's protocol for one of the two streams between which the stranger relays data unchanged.

    :param limit: maximum number of bytes that a program may send before its peer proves that it knows the code. The
        stranger cannot prove this, so a program that sends more bytes breaks the promise.
    """

    def __init__(self, limit: int, broken: Callable[[str], object]) -> None:
        self._limit = limit
        self._broken = broken
        self._size = 0
        self.early: list[bytes] = []
        self.other: _Relayed | None = None

    def connectionMade(self) -> None:
        if self.other is not None and self.other.transport is not None:
            for data in self.other.early:
                stream_of(self).write(data)

    def dataReceived(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit:
            self._broken(f"a stranger between sender and receiver got {self._size} bytes")
        if self.other is not None and self.other.transport is not None:
            stream_of(self.other).write(data)
        else:
            self.early.append(data)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        if self.other is not None and self.other.transport is not None:
            stream_of(self.other).loseConnection()


class _Echo(Protocol):
    """False sender that sends a receiver's own messages back."""

    def dataReceived(self, data: bytes) -> None:
        stream_of(self).write(data)


class _Intercepting(Factory):
    """Factory for the streams of receivers whom discovery has directed to the stranger."""

    noisy = False

    def __init__(self, stranger: CodeStranger) -> None:
        self._stranger = stranger

    def buildProtocol(self, addr: IAddress | None) -> Protocol | None:
        assert isinstance(addr, DmsgAddress)
        return self._stranger.intercept(addr.public_key)


class _Fixed(Factory):
    noisy = False

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return self._protocol


class CodeStranger:
    """Stranger who attacks the senders and receivers of codes, with a client of the stranger's own.

    :param records: records of all codes so far.
    :ivar broken: texts of broken guarantees.
    """

    def __init__(self, lab: Lab, records: Sequence[OfferRecord]) -> None:
        self._lab = lab
        self._records = records
        self._random = Random(f"strangers {lab.seed}")
        self.broken: list[str] = []
        self.client = lab.add_client(NAME)
        self.client.listen(_Intercepting(self), PORT)
        self.intercepted = 0

    def visit(self, kind: str, record: OfferRecord, random: Random) -> None:
        """Open streams to the sender of a code, and behave there as ``kind`` says."""
        for _ in range(STREAMS.get(kind, 1)):
            self._connect(record, Visit(kind, record, Random(random.random()), self.broken.append))

    def _connect(self, record: OfferRecord, protocol: Protocol) -> None:
        connecting: Deferred[IProtocol] = self.client.connect(record.sender, _Fixed(protocol), PORT)
        connecting.addErrback(lambda failure: failure.trap(DmsgError))

    def intercept(self, receiver: PubKey) -> Protocol | None:
        """Return the protocol for a stream from a receiver: one that relays it to the
        sender, or a false sender."""
        record = next((one for one in self._records if receiver in one.told), None)
        if record is None:
            return None
        self.intercepted += 1
        kind = self._random.choice(("echo", "false sender", "relay", "relay"))
        if kind == "echo":
            return _Echo()
        if kind == "false sender":
            false = CodeEnd(self._lab.network.host(NAME), Role.SENDER, Code.make(record.code.nameplate))
            false.agreed.addCallbacks(self._agreed, lambda _: None)
            return false
        record.attempts += 1
        one, two = _Relayed(FROM_RECEIVER, self.broken.append), _Relayed(FROM_SENDER, self.broken.append)
        one.other, two.other = two, one
        self._connect(record, two)
        return one

    def _agreed(self, agreement: CodeAgreement) -> None:
        self.broken.append("a receiver has agreed with a stranger who does not know the code")
