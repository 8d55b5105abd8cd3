"""Streams of a random walk: they are opened, used and closed, and the programs at their ends are killed."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

from twisted.internet.interfaces import IProtocol
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream
from dmsg.streams.streams import CROWD_BYTES
from dmsg.testing.lab import Lab
from dmsg.testing.promise import Fixed, PromiseBroken, Talker, Talkers
from dmsg.testing.stream_places import StreamPlace, state_of
from dmsg.v2019.client import Client

PORT = 7
MAX_UNACKNOWLEDGED = 4_000_000
"""Number of unacknowledged bytes at which an end of a stream sends no more data."""
STREAMS = 6
"""Maximum number of streams that are open at the same time."""
LAST_SIZE = 10_000
"""Size in bytes of the data that an end sends just before it closes its stream."""
MAX_PAUSE = 60.0
"""Maximum seconds of the lab's time between two attempts to open the stream that a walk opens at its end, to check that
a client is reachable."""
PIECES, SMALL, PIECE_SECONDS = 100, 50, 0.001
"""Number of small pieces to send, their maximum size in bytes, and the seconds of the lab's time between two of
them."""


class WalkStreams:
    """Streams between the clients of a walk.

    :param clients: running clients, by name. The walk changes this dictionary when it restarts a client.
    :param seed: seed of the data.
    :ivar open: ends of the open streams.
    :ivar lasting: ends of the streams that are opened at the start of the walk, which never closes them.
    """

    def __init__(self, lab: Lab, clients: dict[str, Client], seed: int) -> None:
        self._lab = lab
        self._clients = clients
        self._seed = seed
        self._talkers = Talkers()
        self._hosts: dict[Talker, tuple[str, str]] = {}
        """Maps each end of a stream to two hosts: that of the initiator, and that of the responder."""
        self._own_host: dict[Talker, str] = {}
        self.open: list[Talker] = []
        self.lasting: tuple[Talker, ...] = ()
        self._closing: list[Talker] = []
        self._opening: list[Talker] = []
        self._orphans: list[Talker] = []
        """Ends of streams whose other end was in a killed program."""
        self._opened = 0

    # --- opening ---

    def listen(self, client: Client) -> None:
        """Let a client accept the streams that are opened at the start of the walk."""
        client.listen(self._talkers, PORT)

    def start(self, initiator: str, responders: Iterable[tuple[str, Client]]) -> None:
        """Open a stream from the client ``initiator`` to each responder, and wait until all are open."""
        for number, (name, remote) in enumerate(responders):
            one = self._talkers.pair(self._seed * 10 + number)
            self._note_hosts(one, initiator, name)
            self._lab.result(self._clients[initiator].connect(remote.public_key, Fixed(one), port=PORT))
            self.open += [one, one.other]  # type: ignore[list-item]
        # An accepting end is built only when the confirmation of the connecting end has arrived.
        self._lab.network.run_until(lambda: all(talker.transport is not None for talker in self.open))
        self.lasting = tuple(self.open)

    def _note_hosts(self, talker: Talker, initiator: str, responder: str) -> None:
        assert talker.other is not None
        self._hosts[talker] = self._hosts[talker.other] = (initiator, responder)
        self._own_host[talker], self._own_host[talker.other] = initiator, responder

    def initiator_of(self, talker: Talker) -> str:
        """Return the name of the client that has opened the stream of an end."""
        return self._hosts[talker][0]

    def responder_of(self, talker: Talker) -> str:
        """Return the name of the client to which the stream of an end was opened."""
        return self._hosts[talker][1]

    def open_one(self, random: Random) -> None:
        """Open another stream between two clients, which may fail."""
        if len(self.open) < 2 * STREAMS:
            self._connect(*random.sample(sorted(self._clients), 2))

    def _connect(self, initiator: str, responder: str) -> Talker:
        one, two = self._clients[initiator], self._clients[responder]
        self._opened += 1
        port = 100 + self._opened
        talker = self._talkers.pair(self._seed * 10 + 10 + self._opened)
        self._note_hosts(talker, initiator, responder)
        other = self._talkers.take()
        two.listen(Fixed(other), port)

        def opened(_: IProtocol) -> None:
            self._opening.remove(talker)
            self.open += [talker, other]

        def failed(failure: Failure) -> None:
            self._opening.remove(talker)
            talker.lost = failure
            failure.trap(DmsgError)

        self._opening.append(talker)
        one.connect(two.public_key, Fixed(talker), port).addCallbacks(opened, failed)
        return talker

    def check_reachable(self, random: Random, timeout: float) -> None:
        """Check that a client can open a stream to another one, after some attempts, and that data arrives.

        :param timeout: maximum seconds of the lab's time.
        :raises AssertionError: no stream could be opened in this time.
        """
        pair = random.sample(sorted(self._clients), 2)
        end = self._lab.clock.seconds() + timeout
        talker = self._connect(*pair)
        pause = 1.0
        while self._lab.clock.seconds() < end:
            self._lab.network.run(0.5)
            if talker.lost is not None:
                self._lab.network.run(pause)
                pause = min(2 * pause, MAX_PAUSE)
                talker = self._connect(*pair)
            elif talker.transport is not None and not talker.sent:
                talker.say(LAST_SIZE)
            elif talker.acknowledged:
                return
        raise AssertionError(f"{pair[0]} cannot reach {pair[1]}")

    # --- data ---

    def say(self, says: Iterable[tuple[int, int]]) -> None:
        """Let ends of open streams send data.

        :param says: pairs of the number of an end and a number of bytes.
        """
        for number, size in says:
            if number < len(self.open):
                talker = self.open[number]
                is_open = talker.transport is not None and talker.lost is None
                may_say = talker.sent - talker.acknowledged < MAX_UNACKNOWLEDGED
                if is_open and may_say and self._has_room(talker, size):
                    talker.say(size)

    def _has_room(self, talker: Talker, size: int) -> bool:
        """Whether the responder of an end's stream may buffer ``size`` more bytes.

        A client closes incoming streams that have been suspended for long and that together buffer more than
        ``CROWD_BYTES``. A walk suspends all streams for long, but no stream may be lost. So the incoming streams of a
        client never buffer more: neither data that the client sends, nor data that its program has not read.
        """
        responder = self._hosts[talker][1]
        held = 0
        for one in {*self.open, *self._closing}:
            if self._hosts[one][1] == responder and one.other is not None:
                held += one.sent - (one.acknowledged if self._own_host[one] == responder else one.other.received)
        return held + size <= CROWD_BYTES

    def say_small_pieces(self, random: Random) -> None:
        """Send many small pieces to an end that does not read. In half of the cases this end then resumes reading."""
        may = [
            talker
            for talker in self.open
            if talker.other is not None
            and all(end.transport is not None and end.lost is None for end in (talker, talker.other))
            and self._has_room(talker, PIECES * SMALL)
        ]
        if not may:
            return
        talker = random.choice(may)
        assert talker.other is not None
        reader = stream_of(talker.other)
        reader.pauseProducing()
        for _ in range(PIECES):
            talker.say(random.randint(1, SMALL))
            # Each piece is sent in a turn of its own. Pieces of the same turn would share a frame.
            self._lab.network.run(PIECE_SECONDS)
        if random.random() < 0.5:
            reader.resumeProducing()

    # --- the end of streams ---

    def finish_one(self, random: Random) -> None:
        """Close a stream at an end, if the other end has no unacknowledged data. The data that the closing end has sent
        must still arrive."""
        may = [
            talker
            for talker in self.open
            if talker not in self.lasting
            and talker.other is not None
            and talker.transport is not None
            and talker.other.transport is not None
            and talker.other.sent == talker.other.acknowledged == talker.received
            and self._has_room(talker, LAST_SIZE)
        ]
        if may:
            talker = random.choice(may)
            self._closing.append(talker)
            self.open[:] = [one for one in self.open if one not in (talker, talker.other)]
            other = talker.other
            assert talker.transport is not None and other is not None and other.transport is not None
            # The stream closes when this data is acknowledged, so later faults happen while it is closing.
            talker.say(LAST_SIZE)
            talker.transport.resumeProducing()  # type: ignore[attr-defined]
            other.transport.resumeProducing()  # type: ignore[attr-defined]
            talker.transport.loseConnection()

    def client_was_killed(self, name: str) -> None:
        """Remove the streams of a client that was killed. If another client is the initiator of such a stream,
        that client must notice that the stream is lost."""
        # A killed client notices nothing any more.
        self._orphans[:] = [left for left in self._orphans if self._own_host[left] != name]
        self._opening[:] = [talker for talker in self._opening if self._own_host[talker] != name]
        for one in (*self.open, *self._closing):
            if name not in self._hosts[one]:
                continue
            pair = (one, one.other)
            self.open[:] = [end for end in self.open if end not in pair]
            self._closing[:] = [end for end in self._closing if end not in pair]
            left = next(end for end in pair if end is not None and self._own_host[end] != name)
            if left.transport is None or left.lost is not None:
                continue
            stream = stream_of(left)
            stream.resumeProducing()  # The stream reports its end only after all data is read.
            # Only initiators resume streams. The other ends wait for the killed client, and their timeout is after the
            # end of the lab.
            if left not in self._orphans and isinstance(stream, ClientStream) and stream.secure_end.initiator:
                self._orphans.append(left)

    # --- checks ---

    def check(self) -> None:
        """Check the promise for all streams, and that none was lost.

        :raises PromiseBroken: a stream has broken the promise.
        """
        self._talkers.check()
        for talker in self.open:
            # If a stream was never opened at its responder, it may fail at its initiator.
            if talker.lost is not None and not self._is_unheard(talker):
                raise PromiseBroken(f"a stream was lost: {talker.lost.value}")

    def _is_unheard(self, talker: Talker) -> bool:
        other = talker.other
        return talker.acknowledged == 0 and other is not None and other.transport is None

    def is_all_there(self) -> bool:
        """Whether all data has arrived, each attempt to open a stream has ended, and each initiator has noticed the
        loss of a stream to a client that was killed."""
        if self._opening:
            return False
        for talker in self._closing:
            # A closing end gives up after some seconds without an acknowledgement, and reports a failure. This is
            # allowed.
            if talker.other is None or (talker.other.received != talker.sent and not talker.failures):
                return False
        # An initiator whose remote program was killed tries to resume the stream, and then learns that the stream no
        # longer exists.
        if not all(talker.lost is not None for talker in self._orphans):
            return False
        return all(
            self._is_unheard(talker)
            or (
                talker.acknowledged == talker.sent and talker.other is not None and talker.other.received == talker.sent
            )
            for talker in self.open
            if talker.transport is not None
        )

    @property
    def acknowledged(self) -> int:
        """Number of acknowledged bytes of all streams together."""
        return sum(talker.acknowledged for pair in self._talkers.pairs for talker in pair)

    def text(self) -> str:
        """Return the numbers of sent and received bytes of all streams as a text, for an error message."""
        talkers = [(talker.sent, talker.acknowledged, talker.received) for talker in self.open]
        orphans = [(talker.sent, talker.received) for talker in self._orphans if talker.lost is None]
        closing = [(talker.sent, talker.other.received) for talker in self._closing if talker.other is not None]
        opening = [self._hosts[talker] for talker in self._opening]
        return f"sent, acknowledged, received {talkers}; closing {closing}; orphans {orphans}; opening {opening}"

    # --- coverage ---

    def places(self, servers: dict[bytes, str]) -> list[StreamPlace]:
        """Return the states and hosts of all ends of streams.

        :param servers: names of the servers, by key.
        """
        places = []
        for talker in (*self.open, *self._opening, *self._closing):
            state = state_of(talker)
            if state is not None:
                # While a stream has no transport, the session of its carrier is None.
                session: Any = getattr(getattr(talker.transport, "_carrier", None), "session", None)
                server = "" if session is None else servers.get(bytes(session.server), "")
                places.append(StreamPlace(state, *self._hosts[talker], server))
        return places
