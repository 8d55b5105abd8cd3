"""Single faults of a random walk, which no other fault may hide. Most of them happen at its end, when the network has
recovered from all others.

During a walk the next fault often hides what the last one has broken: a stream that has stopped sending continues when
it moves again, and an entry that was not published is published after the next loss of a server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

from dmsg.net.streams.transports import stream_of
from dmsg.streams.carrier import ClientStream
from dmsg.testing.faults import KEEPALIVE
from dmsg.testing.lab import Lab
from dmsg.testing.old_relay import OldRelay
from dmsg.testing.promise import PromiseBroken, Talker
from dmsg.testing.stream_places import state_of
from dmsg.testing.tcp import Path
from dmsg.testing.walk_streams import WalkStreams
from dmsg.testing.walk_waits import Waits
from dmsg.v2019.client import Client
from dmsg.v2019.core.peers import Route
from dmsg.v2019.core.wire import FWD, FrameBuffer
from dmsg.v2019.reachability import CHECK_INTERVAL, CHECK_JITTER

MAX_FILL = 4_000_000
"""Maximum number of bytes that are sent to fill the receive window of a paused reader."""
SURPLUS_SIZE = 200_000
"""Number of bytes that are sent in addition to the receive window. These bytes have to wait until the reader reads."""
MIN_PIECE, MAX_PIECE = 20_000, 65_000
"""Minimum and maximum number of bytes of a frame of this data."""
FILL_TIMEOUT = 10.0
"""Maximum seconds of the lab's time until the receive window is full."""
MOVE_TIMEOUT, INSTANT = 2.0, 0.0005
"""Maximum seconds of the lab's time until a stream moves after its server begins to shut down, and seconds between two
checks."""
MOVE_DELAY = 0.02
"""Minimum seconds that a packet between a client and a server takes while the stream moves."""
CLOSE_DELAY = 0.2
"""Seconds that a packet between a client and the server that shuts down takes while the stream moves."""
LAST_FRAME_SIZE = 100
"""Number of bytes in the frame that a server drops."""
IDLE_TIMEOUT = 10.0
"""Maximum seconds of the lab's time until a stream is idle whose hosts and paths have no faults any more."""
ARRIVAL_TIMEOUT = 400.0
"""Maximum seconds of the lab's time until data arrives whose frame the only reachable server has dropped."""
LOSS_COUNT = 8
"""Number of times that a client loses its servers while it posts its entry."""
DISCOVERY_DELAY = 0.15
"""Seconds that each packet between this client and discovery takes."""
POST_TIMEOUT = 20.0
"""Maximum seconds of the lab's time until a client begins to post its changed entry."""
LATE_NOTICE = 200.0
"""Seconds after which a server of 2019 notices that connections of a client are dead."""
REACHABLE_TIMEOUT = CHECK_INTERVAL * (1 + CHECK_JITTER) + 10.0
"""Maximum seconds after that until the client is reachable again, as ``docs/protocol/frames.md`` promises."""
MAX_POST_SECONDS = 2.0
"""Maximum seconds between the beginning of a POST and the loss of the servers. It is longer than most POSTs take."""


class SingleFaults:
    """Single faults in a lab that has recovered.

    :param servers: names of the servers to which faults may happen.
    :param server_names: names of servers, by key.
    """

    def __init__(
        self,
        lab: Lab,
        servers: Sequence[str],
        server_names: Mapping[bytes, str],
        clients: Mapping[str, Client],
        streams: WalkStreams,
        waits: Waits,
    ) -> None:
        self._lab = lab
        self._servers = servers
        self._server_names = server_names
        self._clients = clients
        self._streams = streams
        self._waits = waits

    def read_while_moving(self, random: Random) -> str:
        """Let the responder of a stream stop reading until its receive window is full, and read again while the stream
        moves from a server that shuts down to another one.

        :returns: name of the server that has shut down; empty if no stream could move.
        """
        may = [talker for talker in self._streams.open if self._can_move(talker)]
        if not may:
            return ""
        reader = random.choice(may)
        ends = (reader, reader.other)
        server = self._server_of(reader)
        # The CLOSE of the old transport arrives after the REQUEST that moves the stream. So the responder still has the
        # old transport when it answers.
        before = [(path, path.delay) for path in self._client_paths()]
        for path in self._client_paths():
            path.delay = max(path.delay, MOVE_DELAY)
        for path in self._client_paths(server):
            path.delay = CLOSE_DELAY
        self._fill(reader, random.randint(MIN_PIECE, MAX_PIECE))
        self._lab.leave(server)
        # The responder answers first. Until its answer arrives, the initiator does not know that the stream moves.
        self._lab.network.wait_for(
            lambda: any(end is not None and state_of(end) == "moving" for end in ends), MOVE_TIMEOUT, INSTANT
        )
        self._lab.network.run(random.choice((0.0, MOVE_DELAY / 2, MOVE_DELAY)))
        stream_of(reader).resumeProducing()
        for path, delay in before:
            path.delay = delay
        return server

    def lose_last_frame(self, random: Random) -> bool:
        """Let a server drop the only frame that the initiator of an idle stream sends. No later frame shows the loss,
        so the initiator has to notice that no ACK arrives.

        :returns: whether there was such a stream.
        """
        may = [talker for talker in self._streams.open if self._is_idle(talker) and self._is_initiator(talker)]
        # The server of an idle stream may have no route: if the server was just started again, the stream is still with
        # the former process, which shuts down.
        may = [talker for talker in may if self._route_of(talker) is not None]
        if not may:
            return False
        self._drop_next_frame(random.choice(may))
        return True

    def lose_last_frame_at_only_server(self, random: Random, wanted: Collection[str] = ()) -> str:
        """Cut the initiator of a stream off from all servers but the one that carries the stream, and let this server
        drop the only frame that the initiator then sends. The initiator finds no other server, so the stream has to
        continue over the same one.

        The faults of this server, of the two clients and of the paths between them are repaired first.

        :param wanted: names of clients. The initiator is one of them if one of them has such a stream.
        :returns: name of the initiator; empty if no such stream became idle.
        :raises PromiseBroken: the data does not arrive, although both clients stay connected to the server.
        """
        may = [talker for talker in self._streams.open if self._is_initiator(talker) and self._can_stay(talker)]
        may = [talker for talker in may if self._streams.initiator_of(talker) in wanted] or may
        if not may:
            return ""
        talker = random.choice(may)
        server = self._server_of(talker)
        self._repair(talker, server)
        self._lab.network.wait_for(lambda: self._is_idle(talker), IDLE_TIMEOUT, 0.01)
        if not self._is_idle(talker) or self._server_of(talker) != server or not self._can_stay(talker):
            return ""
        name = self._streams.initiator_of(talker)
        others = [one for one in self._lab.servers if one != server]
        cut = [path for one in others for path in self._paths(name, one) if path.cut_since is None]
        for path in cut:
            path.cut_since = self._lab.clock.seconds()
        self._drop_next_frame(talker)
        self._lab.network.wait_for(
            lambda: talker.acknowledged == talker.sent or not self._are_connected(talker, server), ARRIVAL_TIMEOUT, 0.1
        )
        if talker.acknowledged != talker.sent and self._are_connected(talker, server):
            raise PromiseBroken(
                f"a frame that {server} has dropped does not arrive, although both clients are connected to {server}"
            )
        for path in cut:
            path.cut_since = None
        return name

    def _can_stay(self, talker: Talker) -> bool:
        """Whether the server that carries a stream can also carry it after it was resumed. Servers of 2019 cannot."""
        server = self._server_of(talker)
        return server not in self._lab.old_servers and self._route_of(talker) is not None

    def _repair(self, talker: Talker, server: str) -> None:
        """Repair the faults of a server, and those of the paths between it and the clients of a stream. Let both ends
        read."""
        self._lab.network.host(server).resume()
        for client in (self._streams.initiator_of(talker), self._streams.responder_of(talker)):
            for path in self._paths(client, server):
                path.cut_since = None
                path.loss = path.reorder = path.rate = 0.0
        for end in (talker, talker.other):
            if end is not None and end.transport is not None:
                stream_of(end).resumeProducing()

    def _are_connected(self, talker: Talker, server: str) -> bool:
        """Whether both clients of a stream are connected to a server, and the stream has not ended."""
        if server not in self._lab.servers or talker.lost is not None:
            return False
        connections = self._lab.servers[server].factory.relay.connections
        names = (self._streams.initiator_of(talker), self._streams.responder_of(talker))
        return all(connections.of_key(bytes(self._lab.key(name).public)) for name in names)

    def _drop_next_frame(self, talker: Talker) -> None:
        """Let an end send a frame, which the server of its stream drops."""
        route = self._route_of(talker)
        assert route is not None
        _FrameDroppingPort(route.peer, route.to_id)
        talker.say(LAST_FRAME_SIZE)

    def _paths(self, client: str, server: str) -> Sequence[Path]:
        network = self._lab.network
        return network.both_ways(network.host(client), network.host(server))

    def _route_of(self, talker: Talker) -> Route | None:
        """Return the route, at the server of an initiator's stream, by which the server forwards the initiator's
        frames."""
        server = self._lab.servers.get(self._server_of(talker))
        stream = talker.transport
        if server is None or self._server_of(talker) not in self._servers or not isinstance(stream, ClientStream):
            return None
        transport: Any = stream.secure_end.transport
        key = bytes(self._clients[self._streams.initiator_of(talker)].public_key)
        peers = server.factory.relay.connections.of_key(key)
        return next((peer.routes[transport.id] for peer in peers if transport.id in peer.routes), None)

    @staticmethod
    def _is_idle(talker: Talker) -> bool:
        """Whether no data is in flight between an end of a stream and the other end."""
        if not isinstance(talker.transport, ClientStream) or talker.other is None:
            return False
        return state_of(talker) == state_of(talker.other) == "idle"

    @staticmethod
    def _is_initiator(talker: Talker) -> bool:
        stream = talker.transport
        return isinstance(stream, ClientStream) and stream.secure_end.initiator

    def _server_of(self, talker: Talker) -> str:
        carrier = getattr(talker.transport, "_carrier", None)
        session = getattr(carrier, "session", None)
        return "" if session is None else self._server_names.get(bytes(session.server), "")

    def _can_move(self, talker: Talker) -> bool:
        """Whether an end of a stream is the responder, and the stream is idle and can move to another server. Only a
        responder reads over the old transport while the stream moves."""
        stream = talker.transport
        if not self._is_idle(talker) or self._is_initiator(talker) or not isinstance(stream, ClientStream):
            return False
        if stream.secure_end.offer_window() + SURPLUS_SIZE > MAX_FILL:
            return False
        # Servers of 2019 carry no resumed streams.
        running = [name for name in self._servers if name in self._lab.servers and name not in self._lab.old_servers]
        return len(running) > 1 and self._server_of(talker) in running

    def _fill(self, reader: Talker, piece: int) -> None:
        """Stop an end of a stream from reading, and fill its receive window.

        :param piece: number of bytes of each frame. It determines after which frames the reader announces its window.
        """
        stream = stream_of(reader)
        assert isinstance(stream, ClientStream) and reader.other is not None
        end = stream.secure_end
        stream.pauseProducing()
        for _ in range(0, end.offer_window() + SURPLUS_SIZE, piece):
            reader.other.say(piece)
            # Pieces of the same reactor turn would share a frame.
            self._lab.network.run(INSTANT)
        self._lab.network.wait_for(lambda: not end.offer_window(), FILL_TIMEOUT, 0.01)

    def _client_paths(self, server: str = "") -> list[Path]:
        """Return the paths between clients and a server, or all servers, in both directions."""
        servers = [server] if server else self._servers
        return [path for client in self._clients for name in servers for path in self._paths(client, name)]

    def go_half_open(self, random: Random) -> None:
        """Give a client a new address, without a packet to either end of its connections. The client connects again at
        once, and its servers of 2019 notice later that the earlier connections are dead, as hours later. Then the
        client must soon be reachable through all its servers again.

        :raises PromiseBroken: the client has no server, or is not reachable through one.
        """
        name = random.choice(sorted(self._clients))
        client, old = self._clients[name], self._lab.old_servers
        self._lab.network.host(name).lose_silently(
            lambda host: 0.0 if host == name else LATE_NOTICE if host in old else KEEPALIVE
        )
        self._lab.network.run((LATE_NOTICE if old else KEEPALIVE) + REACHABLE_TIMEOUT)
        key = bytes(client.public_key)
        # Visited servers do not count, because the client's entry does not name them.
        links = client._set.links.values()  # noqa: SLF001  # Clients do not show which of their connections last.
        for link in [link for link in links if link.session is not None]:
            server = self._server_names.get(bytes(link.server), "")
            relay = self._lab.servers[server].factory.relay if server in self._lab.servers else None
            if isinstance(relay, OldRelay) and key in relay.unreachable:
                raise PromiseBroken(f"{name} is not reachable through {server}, which has noticed a dead connection")
        if client.status != "online":
            raise PromiseBroken(f"{name} is {client.status} after a change of its address: {client.last_error}")

    def lose_servers_while_posting(self, random: Random) -> None:
        """Let a client lose the connections to its servers several times, while it posts its entry to a discovery with
        a long delay. Each time, the program waits for the entry to be published.

        :raises PromiseBroken: a Deferred on which the program waits does not fire.
        """
        name = random.choice(sorted(self._clients))
        client = self._clients[name]
        paths = self._discovery_paths(name)
        for path in paths:
            path.delay += DISCOVERY_DELAY
        publisher = client._publisher  # noqa: SLF001  # Clients do not show when they post.
        self._lose_servers(name)
        for _ in range(LOSS_COUNT):
            self._lab.network.wait_for(lambda: publisher.is_busy, POST_TIMEOUT, 0.01)
            self._lab.network.run(random.uniform(0.0, MAX_POST_SECONDS) + INSTANT)
            self._lose_servers(name)
            self._waits.begin(name)
            self._waits.check()
            if random.random() < 0.5:
                self._lose_servers(name)
        for path in paths:
            path.delay -= DISCOVERY_DELAY

    def _lose_servers(self, name: str) -> None:
        """Reset all connections between a client and servers."""
        network = self._lab.network
        addresses = {network.host(server).address for server in self._server_names.values()}
        for end in list(network.host(name).ends):
            if end.getPeer().host in addresses:
                end.reset_by_peer()
                end.other.reset_by_peer()

    def _discovery_paths(self, name: str) -> list[Path]:
        network = self._lab.network
        hosts = [host for other, host in network.hosts.items() if other.startswith("discovery")]
        return [path for host in hosts for path in network.both_ways(network.host(name), host)]


class _FrameDroppingPort:
    """Replacement for the port of a client in a relay, which drops the next FWD of one transport, and then removes
    itself."""

    def __init__(self, peer: Any, transport_id: int) -> None:
        self._peer = peer
        self._port = peer.port
        self._id = transport_id
        self._frames = FrameBuffer()
        peer.port = self

    def __getattr__(self, name: str) -> object:
        return getattr(self._port, name)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all frames but the first FWD of the transport."""
        for frame in self._frames.feed(bytes(data)):
            if self._peer.port is self and (frame.type, frame.id) == (FWD, self._id):
                self._peer.port = self._port
            else:
                self._port.send(frame.encode())
