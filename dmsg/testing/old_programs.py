"""Programs of 2019 in a lab: two clients that repeat a recorded exchange of frames, and check the frames that they
receive.

Each client connects to a server of the lab with its recorded key, and sends its recorded frames when the frames that
came before them have arrived. Each frame that it receives must be the next recorded one. The recording determines
neither ids that a server chooses nor the reason in a CLOSE.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from dmsg.keys import SecKey
from dmsg.testing.faults import MALFORMED
from dmsg.testing.lab import SERVER_PORT, Lab
from dmsg.testing.network import Host
from dmsg.testing.old_exchanges import EXCHANGES, RUDE_EXCHANGES
from dmsg.testing.promise import PromiseBroken
from dmsg.testing.raw_client import RawClient, RawFactory
from dmsg.testing.tcp import End
from dmsg.v2019.core.wire import CLOSE, REQUEST, Frame

KEYS = {"A": SecKey.from_seed(b"client-a"), "B": SecKey.from_seed(b"client-b")}
"""Keys of the recorded clients."""
HOSTS = {"A": "old-a", "B": "old-b"}
DELAY = 1.0
"""Seconds between the connections of the responder and of the initiator to the server. The responder must be connected
when the initiator's REQUEST arrives."""
EXCHANGE_TIMEOUT = 60.0
"""Seconds without a frame after which an exchange counts as interrupted. The clients then connect again and begin the
next exchange. An interruption is an error unless faults happen to the server."""


class Recorded(NamedTuple):
    """Frame that one client sends or receives in a recorded exchange.

    :ivar is_sent: whether the client sends the frame.
    :ivar line: number of the frame in the exchange.
    """

    is_sent: bool
    frame: Frame
    line: int


def recorded(text: str, client: str) -> Iterator[Recorded]:
    """Yield the frames of an exchange that a client sends or receives."""
    keys = {name: bytes(key.public).hex() for name, key in KEYS.items()}
    for number, line in enumerate(text.strip().split("\n")):
        hop, _, rest = line.partition(" ")
        source, _, target = hop.partition("->")
        if client in (source, target):
            kind, own_id, payload = (*rest.split(" "), "")[:3]
            frame = Frame(int(kind, 16), int(own_id, 16), bytes.fromhex(payload.format(**keys)))
            yield Recorded(source == client, frame, number)


class Order:
    """Order of the frames of an exchange, which both clients keep: a client sends a frame when all frames before it
    have arrived.

    :ivar clients: clients that repeat the exchange.
    """

    def __init__(self) -> None:
        self.clients: list[OldClient] = []
        self._done: set[int] = set()
        self._next = 0

    def is_due(self, line: int) -> bool:
        """Whether all frames before this one have been sent and have arrived."""
        return line == self._next

    def done(self, line: int) -> None:
        """Note that a client has sent or received a frame."""
        self._done.add(line)
        while self._next in self._done:
            self._next += 1

    def go_on(self) -> None:
        """Let the clients send the frames that are due."""
        before = -1
        while before != self._next:
            before = self._next
            for client in self.clients:
                client.send_what_is_due()


class OldClient(RawClient):
    """Client of 2019 that repeats its part of a recorded exchange.

    :param name: name of the recorded client.
    :param text: the exchange.
    :param order: order of the frames of the exchange.
    :ivar wrong: description of an unexpected frame that was received instead of the next recorded frame; empty if there
        was none.
    :ivar may_be_lost: whether the unexpected frame can result from a fault, such as the loss of a connection.
    :ivar moved_at: time of the last frame, in seconds of the host's clock.
    """

    def __init__(self, host: Host, name: str, server: SecKey, text: str, order: Order) -> None:
        super().__init__(KEYS[name], server.public)
        self._host = host
        self._order = order
        self._left = list(recorded(text, name))
        self._ids: dict[int, int] = {}
        self._has_given_up = False
        self.wrong = ""
        self.may_be_lost = False
        self.moved_at = host.seconds()

    @property
    def is_done(self) -> bool:
        """Whether the client has sent and received all recorded frames."""
        return not self._left

    def give_up(self) -> None:
        """End the connection, and do nothing more."""
        self._left.clear()
        self._has_given_up = True
        if isinstance(self.transport, End):
            self.transport.abortConnection()

    def connectionMade(self) -> None:
        super().connectionMade()
        if self._has_given_up:
            self.give_up()

    def frames_changed(self) -> None:
        """Compare the received frames with the recorded ones, and send the recorded frames that follow them."""
        frames = self.take()
        if self._has_given_up:
            return
        for frame in frames:
            self.moved_at = self._host.seconds()
            if not self.wrong and not self._is_expected(frame):
                self.wrong = f"{frame} was received in place of {self._left[0].frame if self._left else 'nothing'}"
                self.may_be_lost = frame.type in (CLOSE, REQUEST) or frame == MALFORMED
            if self.wrong:
                return
            self._order.done(self._left.pop(0).line)
        self._order.go_on()

    def send_what_is_due(self) -> None:
        """Send the next recorded frames, as far as all frames before them have arrived."""
        while not self.closed and not self.wrong and self._left and self._left[0].is_sent:
            if not self._order.is_due(self._left[0].line):
                return
            _, frame, line = self._left.pop(0)
            self._order.done(line)
            self.send(Frame(frame.type, self._ids.get(frame.id, frame.id), frame.payload).encode())

    def _is_expected(self, frame: Frame) -> bool:
        if not self._left or self._left[0].is_sent:
            return False
        expected = self._left[0].frame
        if frame.type == REQUEST:
            self._ids[expected.id] = frame.id
        is_equal = frame.payload == expected.payload
        if frame.type == CLOSE:
            is_equal = len(frame.payload) == len(expected.payload)
        return frame.type == expected.type and frame.id == self._ids.get(expected.id, expected.id) and is_equal


class OldPair:
    """Two clients of 2019 that repeat recorded exchanges over a server, one after another.

    :param server: name of the server.
    :param seed: seed of the order of the exchanges.
    :param is_steady: whether no fault happens to the server, so that no exchange may be interrupted. The clients then
        leave out the exchanges in which they break the protocol, because the walk checks that the server counts no
        fault of a client.
    :ivar rude_at: names of the servers at which the clients may break the protocol.
    :ivar finished: number of exchanges that were finished.
    :ivar interrupted: number of exchanges that were interrupted by faults.
    """

    def __init__(self, lab: Lab, server: str, seed: int, *, is_steady: bool) -> None:
        self._lab = lab
        self._server = server
        self._random = Random(f"old programs {seed}")
        self._is_steady = is_steady
        self.rude_at = () if is_steady else (server,)
        self._clients: list[OldClient] = []
        self._failed = False
        self.finished = self.interrupted = 0

    def proceed(self) -> None:
        """Begin the next exchange if the present one is finished or was interrupted.

        :raises PromiseBroken: a client has received a frame that differs from the recorded one, or the exchange was
            interrupted although no fault happens to the server.
        """
        self.check()
        if self._clients and all(client.is_done for client in self._clients):
            self.finished += 1
        elif self._clients and not self._is_interrupted():
            return
        elif self._clients:
            self.interrupted += 1
            if self._is_steady:
                raise PromiseBroken("an exchange of programs of 2019 was interrupted")
        self._begin(self._random.choice(sorted(EXCHANGES.keys() - (RUDE_EXCHANGES if self._is_steady else set()))))

    def check(self) -> None:
        """Check that the clients have received only the recorded frames.

        :raises PromiseBroken: a client has received a frame that differs from the recorded one.
        """
        for client in self._clients:
            # While faults happen, two kinds of unexpected frames are no error. If the other client's connection ends,
            # the server closes the transports between the clients. A REQUEST of an earlier exchange, which was
            # interrupted, may arrive late.
            if client.wrong and (self._is_steady or not client.may_be_lost):
                raise PromiseBroken(f"a program of 2019: {client.wrong}")

    def _is_interrupted(self) -> bool:
        now = self._lab.clock.seconds()
        stalled = all(client.is_done or now - client.moved_at > EXCHANGE_TIMEOUT for client in self._clients)
        lost = any(client.wrong or (client.closed and not client.is_done) for client in self._clients)
        return self._failed or stalled or lost

    def _begin(self, name: str) -> None:
        for client in self._clients:
            client.give_up()
        self._failed = False
        text = EXCHANGES[name]
        # B connects first, because the server refuses A's REQUEST while B is not connected.
        order = Order()
        self._clients = order.clients
        for letter in ("B", "A"):
            if f"->{letter}" in text:
                host = self._lab.network.host(HOSTS[letter])
                client = OldClient(host, letter, self._lab.key(self._server), text, order)
                self._clients.append(client)
                host.callLater(0.0 if letter == "B" else DELAY, self._connect, host, client)

    def _connect(self, host: Host, client: OldClient) -> None:
        def failed() -> None:
            self._failed = True

        address = self._lab.network.host(self._server).address
        host.connectTCP(address, SERVER_PORT, RawFactory(client, failed))

    def is_ahead_of(self, finished: int) -> bool:
        """Call :meth:`proceed`. Return whether the number of finished exchanges is now greater than ``finished``."""
        self.proceed()
        return self.finished > finished
