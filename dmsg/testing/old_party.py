"""Client of 2019 in a walk, and a client of today, which open plain transports to each other over one server.

Each end sends back what it receives. Bytes that return are the bytes that were sent, in order, and acknowledged bytes
have arrived. A plain transport ends with its connection, so after a fault the clients open another one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IProtocol
from twisted.internet.protocol import Factory, Protocol, connectionDone
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import ClientMeta, Entry
from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.keys import PubKey, SecKey
from dmsg.net.streams.transports import stream_of
from dmsg.testing.lab import SERVER_PORT, Lab
from dmsg.testing.network import Host
from dmsg.testing.old_client import OldTransport, OldTransports
from dmsg.testing.old_relay import VERSION, OldRelay
from dmsg.testing.promise import Pattern, PromiseBroken
from dmsg.testing.raw_client import RawClient, RawFactory
from dmsg.testing.tcp import End

OLD_HOST, NEW_HOST = "old-c", "newcomer"
"""Hosts of the client of 2019 and of the client of today."""
HEAD = 8
"""Number of bytes at the beginning of a transport. They are the number of the conversation, and do not return."""
SIZES = (1, 100, 3000, 60_000)
"""Possible numbers of bytes of a conversation."""
PIECE = 8000
"""Maximum number of bytes that the client of 2019 sends in one frame."""
STALL_TIMEOUT = 60.0
"""Seconds without progress after which a conversation has failed. The client of 2019 then connects again, because it
has no keepalive."""
RENEW_EVERY = 30.0
"""Minimum seconds between two resets of a connection over which a server of 2019 no longer sends REQUESTs."""
POST_EVERY = 30.0
"""Seconds between two posts of the entry of the client of 2019, because a discovery may have lost the entry."""


class Conversation:
    """Bytes that one end of a transport sends, and that the other end sends back.

    :ivar sent: number of bytes that were sent.
    :ivar acknowledged: number of these bytes that were acknowledged.
    :ivar arrived: number of these bytes that arrived at the other end.
    :ivar returned: number of these bytes that came back.
    :ivar is_lost: whether the transport has ended.
    :ivar moved_at: time of the last progress, in seconds of the lab's clock.
    """

    def __init__(self, number: int, size: int, now: float) -> None:
        self.number = number
        self.size = size
        self._arriving, self._returning = Pattern(number), Pattern(number)
        self.sent = self.acknowledged = self.arrived = self.returned = 0
        self.is_open = self.is_lost = False
        self.moved_at = now

    def data(self) -> bytes:
        """Return everything that the sending end sends."""
        self.sent = self.size
        return self.number.to_bytes(HEAD, "big") + Pattern(self.number).take(self.size)

    def arrive(self, data: bytes, now: float) -> None:
        """Check bytes that have arrived at the other end.

        :raises PromiseBroken: other bytes were sent.
        """
        if data != self._arriving.take(len(data)):
            raise PromiseBroken(f"wrong bytes arrived on a plain transport after byte {self.arrived}")
        self.arrived += len(data)
        self.moved_at = now

    def come_back(self, data: bytes, now: float) -> None:
        """Check bytes that have come back.

        :raises PromiseBroken: other bytes were sent.
        """
        if data != self._returning.take(len(data)):
            raise PromiseBroken(f"wrong bytes came back on a plain transport after byte {self.returned}")
        self.returned += len(data)
        self.moved_at = now

    def check(self) -> None:
        """Check the numbers of bytes.

        :raises PromiseBroken: more bytes arrived, came back or were acknowledged than possible.
        """
        acknowledged = max(0, self.acknowledged - HEAD)
        if not max(self.returned, acknowledged) <= self.arrived <= self.sent:
            raise PromiseBroken(
                f"{self.sent} bytes were sent on a plain transport, {acknowledged} were acknowledged, {self.arrived} "
                f"arrived and {self.returned} came back"
            )


class _Echo:
    """Receiving end of a conversation, which it learns from the first bytes."""

    def __init__(self, party: OldParty) -> None:
        self._party = party
        self._head = b""
        self._conversation: Conversation | None = None

    def receive(self, data: bytes) -> bytes:
        """Check received bytes. Return the bytes to send back."""
        if self._conversation is None:
            self._head += data
            if len(self._head) < HEAD:
                return b""
            number, data = int.from_bytes(self._head[:HEAD], "big"), self._head[HEAD:]
            self._conversation = self._party.find(number)
        self._conversation.arrive(data, self._party.now())
        return data


class _EchoProtocol(Protocol):
    """Echo at the client of today."""

    def __init__(self, party: OldParty) -> None:
        self._echo = _Echo(party)

    def dataReceived(self, data: bytes) -> None:
        if back := self._echo.receive(data):
            stream_of(self).write(back)


class _Sender(Protocol):
    """Sending end at the client of today."""

    def __init__(self, party: OldParty, conversation: Conversation) -> None:
        self._party = party
        self._conversation = conversation

    def connectionMade(self) -> None:
        conversation = self._conversation
        conversation.is_open = True
        conversation.moved_at = self._party.now()
        data = conversation.data()

        def arrived(_: object) -> None:
            conversation.acknowledged = len(data)

        stream_of(self).send(data).addCallbacks(arrived, lambda failure: failure.trap(DmsgError))

    def dataReceived(self, data: bytes) -> None:
        self._conversation.come_back(data, self._party.now())

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self._conversation.is_lost = True


class _Echoes(Factory):
    noisy = False

    def __init__(self, party: OldParty) -> None:
        self._party = party

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return _EchoProtocol(self._party)


class _Senders(Factory):
    noisy = False

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender

    def buildProtocol(self, addr: IAddress | None) -> Protocol:
        return self._sender


class OldNode(RawClient):
    """Connection of the client of 2019."""

    def __init__(self, party: OldParty, key: SecKey, server: PubKey) -> None:
        super().__init__(key, server)
        self._party = party
        self._transports = OldTransports(key.public)
        self._echoes: dict[OldTransport, _Echo] = {}
        self._own: dict[OldTransport, Conversation] = {}
        self.is_ready = False

    def begin(self, remote: PubKey, conversation: Conversation) -> None:
        """Open a transport, and send the bytes of a conversation."""
        self._own[self._transports.open(remote)] = conversation
        self._flush()

    def end(self) -> None:
        """Close the transports that this client has opened."""
        for transport in list(self._own):
            self._transports.close(transport)
        self._own.clear()
        self._flush()

    def give_up(self) -> None:
        """End the connection."""
        self.closed = True
        if isinstance(self.transport, End):
            self.transport.abortConnection()

    def frames_changed(self) -> None:
        for frame in self.take():
            if self.closed:
                return
            self.is_ready = True
            try:
                self._transports.receive(frame)
            except RemoteProtocolError:
                self._flush()
                self.give_up()
                break
        if self.closed:
            for conversation in self._own.values():
                conversation.is_lost = True
            self._own.clear()
            return
        while self._transports.accepted:
            self._echoes[self._transports.accepted.popleft()] = _Echo(self._party)
        for transport, echo in list(self._echoes.items()):
            while transport.received:
                self._write(transport, echo.receive(transport.received.popleft()))
            if transport.is_closed:
                del self._echoes[transport]
        for transport, conversation in list(self._own.items()):
            self._talk(transport, conversation)
        self._flush()

    def _talk(self, transport: OldTransport, conversation: Conversation) -> None:
        if transport.is_open and not conversation.is_open:
            conversation.is_open = True
            self._write(transport, conversation.data())
        conversation.acknowledged = transport.acknowledged
        while transport.received:
            conversation.come_back(transport.received.popleft(), self._party.now())
        if transport.is_closed:
            conversation.is_lost = True
            del self._own[transport]

    def _write(self, transport: OldTransport, data: bytes) -> None:
        for at in range(0, len(data), PIECE):
            self._transports.write(transport, data[at : at + PIECE])

    def _flush(self) -> None:
        for frame in self._transports.take():
            if not self.closed:
                self.send(frame.encode())


class OldParty:
    """Client of 2019 and client of today.

    :param server: name of the server over which they communicate.
    :param is_steady: whether no fault happens to the server, so that a conversation that the client of today has begun
        may not be interrupted.
    :ivar finished: numbers of finished conversations: those that the client of today has begun, and those that the
        client of 2019 has begun.
    """

    def __init__(self, lab: Lab, server: str, seed: int, *, is_steady: bool) -> None:
        self._lab = lab
        self._server = server
        self._random = Random(f"old party {seed}")
        self._is_steady = is_steady
        self._key = lab.key(OLD_HOST)
        self._host: Host = lab.network.host(OLD_HOST)
        self._lookups = lab.lookups(self._host)
        self._conversations: list[Conversation] = []
        self._node: OldNode | None = None
        self._connected_at = 0.0
        self._posted_at = -POST_EVERY
        self._renewed_at = -RENEW_EVERY
        self._ours: Conversation | None = None
        self._sender: _Sender | None = None
        self._theirs: Conversation | None = None
        self.finished = [0, 0]
        only = [lab.key(server).public]
        self._client = lab.add_client(NEW_HOST, only=only, min_servers=1, encryption="prefer")
        self._client.listen(_Echoes(self))

    def now(self) -> float:
        """Return the time of the lab's clock in seconds."""
        return self._lab.clock.seconds()

    def find(self, number: int) -> Conversation:
        """Return a conversation that has begun.

        :raises PromiseBroken: there is none of this number.
        """
        if number >= len(self._conversations):
            raise PromiseBroken("wrong bytes arrived at the beginning of a plain transport")
        return self._conversations[number]

    def is_ahead_of(self, finished: list[int]) -> bool:
        """Call :meth:`proceed`, and return whether conversations of both kinds have finished since ``finished``."""
        self.proceed()
        return all(now > before for now, before in zip(self.finished, finished, strict=True))

    def check(self) -> None:
        """Check all conversations.

        :raises PromiseBroken: bytes were lost or invented, or a conversation was interrupted without a reason.
        """
        for conversation in (self._ours, self._theirs):
            if conversation is not None:
                conversation.check()
        ours = self._ours
        if self._is_steady and ours is not None and ours.is_open and ours.is_lost and ours.returned < ours.size:
            raise PromiseBroken("a plain transport between a client of 2019 and one of today has ended")

    def proceed(self) -> None:
        """Do what is due: connect and post the entry of the client of 2019, and begin and end conversations.

        :raises PromiseBroken: see :meth:`check`.
        """
        self.check()
        self._renew_lost_connection()
        self._keep_connected()
        if self._ours is None or self._is_over(self._ours, 0):
            self._end_ours()
            self._ours = self._make()
            self._host_of_ours().do(partial(self._begin_ours, self._ours))
        node = self._node
        if node is None or not node.is_ready or node.closed:
            return
        if self._theirs is None or self._is_over(self._theirs, 1):
            node.end()
            self._theirs = self._make()
            node.begin(self._client.public_key, self._theirs)

    def _renew_lost_connection(self) -> None:
        """Reset the connection of the client of 2019 if its server, also of 2019, no longer sends REQUESTs over it.
        This client does not notice the fault by itself; that of today does."""
        server = self._lab.servers.get(self._server)
        relay = None if server is None else server.factory.relay
        if not isinstance(relay, OldRelay) or self.now() - self._renewed_at < RENEW_EVERY:
            return
        if bytes(self._key.public) in relay.unreachable:
            self._renewed_at = self.now()
            self._host.reset()

    def _host_of_ours(self) -> Host:
        return self._lab.network.host(NEW_HOST)

    def _make(self) -> Conversation:
        conversation = Conversation(len(self._conversations), self._random.choice(SIZES), self.now())
        self._conversations.append(conversation)
        return conversation

    def _is_over(self, conversation: Conversation, kind: int) -> bool:
        if conversation.is_open and conversation.returned == conversation.size:
            self.finished[kind] += 1
            return True
        return conversation.is_lost or self.now() - conversation.moved_at > STALL_TIMEOUT

    def _begin_ours(self, conversation: Conversation) -> None:
        sender = self._sender = _Sender(self, conversation)
        connecting: Deferred[IProtocol] = self._client.connect(self._key.public, _Senders(sender))

        def failed(failure: Failure) -> None:
            failure.trap(DmsgError)
            conversation.is_lost = True

        connecting.addErrback(failed)

    def _end_ours(self) -> None:
        sender, self._sender = self._sender, None
        if sender is not None and sender.transport is not None:
            self._host_of_ours().do(sender.transport.loseConnection)

    # --- the client of 2019 ---

    def _keep_connected(self) -> None:
        now = self.now()
        is_stalled = self._theirs is not None and now - self._theirs.moved_at > STALL_TIMEOUT
        if self._node is None or self._node.closed or (is_stalled and now - self._connected_at > STALL_TIMEOUT):
            if self._node is not None:
                self._node.give_up()
            node = self._node = OldNode(self, self._key, self._lab.key(self._server).public)
            self._connected_at = now

            def failed() -> None:
                node.closed = True

            factory = RawFactory(node, failed)
            self._host.connectTCP(self._lab.network.host(self._server).address, SERVER_PORT, factory)
        if now - self._posted_at >= POST_EVERY:
            self._posted_at = now
            self._host.do(self._post)

    def _post(self) -> None:
        servers = (self._lab.key(self._server).public.hex(),)

        def make(entry: Entry) -> Entry:
            return replace(entry, version=VERSION, client=ClientMeta(servers))

        self._lookups.update(self._key, make).addErrback(lambda failure: failure.trap(DmsgError))
