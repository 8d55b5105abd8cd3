"""Liar: server that misbehaves on purpose. It changes, drops, repeats or invents frames that it sends to its clients.

The server itself is the real one. A :class:`Liar` intercepts the frames between its relay and the connections of its
clients, and applies the lies of a plan to them (:mod:`dmsg.testing.lies`). All liars of a lab cooperate: a liar can
repeat a frame that another liar has seen.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from random import Random
from typing import cast

from dmsg.keys import PubKey
from dmsg.testing.determinism import Trace
from dmsg.testing.network import Host
from dmsg.testing.plan import Lie
from dmsg.v2019.core.peers import ConnectionPort, RelayPeer
from dmsg.v2019.core.wire import ACCEPT, ACK, CLOSE, FWD, ID_COUNT, REQUEST, Frame, FrameBuffer
from dmsg.v2019.server import Server

FRAMES_PER_TYPE = 256
"""Number of last frames of each type that the liars of a lab store, to repeat them later."""
DATA = frozenset({FWD, ACK})
TRANSPORT = frozenset({REQUEST, ACCEPT, CLOSE, FWD, ACK})


Teller = Callable[["LyingPort", Frame, Random], list[Frame]]
"""Function of a lie: returns the frames to send in place of one frame."""


class Alliance:
    """State that all liars of a lab share: the frames that they have seen, and counts of their lies.

    :ivar seen: payloads of the last frames, by type of frame.
    :param on_told: callback invoked with the kind of each lie that is told.
    :ivar told: number of lies so far, by kind of lie.
    :ivar teller: name of the host that has told the last lie.
    """

    def __init__(self, trace: Trace | None = None, on_told: Callable[[str], None] = lambda kind: None) -> None:
        self.trace = trace
        self.on_told = on_told
        self.seen: dict[int, deque[bytes]] = {kind: deque(maxlen=FRAMES_PER_TYPE) for kind in sorted(TRANSPORT)}
        self.told: Counter[str] = Counter()
        self.teller = ""


class Liar:
    """Server that can lie to its clients.

    :param host: host of the server.
    :param kinds: kinds of lies by name: the types of frames to which a lie applies, and its function.
    :ivar honest: whether the server does not lie at present.
    """

    def __init__(
        self, host: Host, server: Server, alliance: Alliance, kinds: Mapping[str, tuple[frozenset[int], Teller]]
    ) -> None:
        self.host = host
        self.kinds = kinds
        self.relay = server.factory.relay
        self.alliance = alliance
        self.honest = False
        self._lies: list[_Pending] = []
        self._known: dict[RelayPeer, LyingPort] = {}
        for peer in self.relay.peers:
            self._take(peer)
        add = self.relay.add

        def add_and_take(key: PubKey, port: ConnectionPort) -> RelayPeer:
            peer = add(key, port)
            self._take(peer)
            return peer

        self.relay.add = add_and_take  # type: ignore[method-assign]

    def _take(self, peer: RelayPeer) -> None:
        port = self._known[peer] = LyingPort(self, peer)
        peer.port = cast(ConnectionPort, port)

    def tell(self, lies: tuple[Lie, ...]) -> None:
        """Add planned lies, and begin to lie."""
        self.honest = False
        self._lies += [_Pending(lie) for lie in lies]

    def stop_lying(self) -> None:
        """Discard the planned lies, and send the frames that were delayed."""
        self.honest = True
        self._lies.clear()
        for port in list(self._known.values()):
            port.stop_lying()

    def due(self, frame: Frame) -> _Pending | None:
        """Return the lie to apply to a frame that is about to be sent; None for no lie."""
        found = None
        for one in self._lies:
            if one.left > 0:
                one.left -= 1
            elif found is None and frame.type in self.kinds[one.lie.kind][0]:
                found = one
        if found is not None:
            found.left = found.lie.again
            if not found.lie.again:
                self._lies.remove(found)
        return found

    def port_of(self, peer: RelayPeer) -> LyingPort:
        """Return the replacement for the connection to a connected client."""
        return self._known[peer]

    @property
    def peers(self) -> list[RelayPeer]:
        """Connected clients."""
        self._known = {peer: port for peer, port in self._known.items() if peer in self.relay.peers}
        return list(self._known)


class _Pending:
    """Planned lie that will be applied to a future frame.

    :ivar left: number of frames to send before the lie.
    """

    def __init__(self, lie: Lie) -> None:
        self.lie = lie
        self.left = lie.after
        self.random = Random(lie.chance)


class LyingPort:
    """Replacement for the connection to a client. It applies lies to the frames that the server sends."""

    def __init__(self, liar: Liar, peer: RelayPeer) -> None:
        self.liar = liar
        self.peer = peer
        self.port = peer.port
        self._frames = FrameBuffer()
        self.to_drop: dict[tuple[int, int], int] = {}
        """Number of further frames to drop, by type and transport id."""
        self.swapped: dict[int, tuple[int, int]] = {}
        """Substitute id for the frames of a transport, and number of further frames to send under it, by transport
        id."""
        self.held: dict[int, list[Frame]] = {}
        """Frames that are delayed, by transport id."""
        self.postponed: list[Frame] = []
        """Frames that a lie has postponed. They are sent after the next frame to which no lie is applied."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.port, name)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send frames to the client, after applying lies to them."""
        if self.liar.honest and not self.held and not self.postponed:
            self.port.send(data)
            return
        out: list[Frame] = []
        for frame in self._frames.feed(bytes(data)):
            out += self._apply_lies(frame)
        self.put(out)

    def put(self, frames: list[Frame]) -> None:
        """Send frames to the client unchanged: no lie is applied to them."""
        data = b"".join(frame.encode() for frame in frames)
        if data:
            self.port.send(data)

    def _apply_lies(self, frame: Frame) -> list[Frame]:
        """Return the frames to send in place of one frame."""
        out = self._with_lies(frame)
        seen = self.liar.alliance.seen.get(frame.type)
        if seen is not None:
            seen.append(frame.payload)
        return out

    def _with_lies(self, frame: Frame) -> list[Frame]:
        alliance = self.liar.alliance
        place = (frame.type, frame.id)
        if self.to_drop.get(place, 0):
            self.to_drop[place] -= 1
            return []
        if frame.id in self.held and frame.type in TRANSPORT:
            self.held[frame.id].append(frame)
            return []
        if frame.type in DATA and self.swapped.get(frame.id, (0, 0))[1]:
            other, left = self.swapped[frame.id]
            self.swapped[frame.id] = other, left - 1
            frame = Frame(frame.type, other, frame.payload)
        pending = self.liar.due(frame)
        out = [frame]
        if pending is not None:
            kind = pending.lie.kind
            alliance.told[kind] += 1
            alliance.teller = self.liar.host.name
            alliance.on_told(kind)
            if alliance.trace is not None:
                now = self.liar.host.seconds()
                alliance.trace.note(now, self.liar.host.name, "lies:", kind, f"type {frame.type:#x} id {frame.id}")
            out = self.liar.kinds[kind][1](self, frame, pending.random)
        after, self.postponed = self.postponed, []
        if pending is not None:
            # A lie was applied to this frame. The postponed frames wait for a frame to which no lie is applied.
            self.postponed, after = after, []
        return out + after

    # --- helpers for lies ---

    def some_id(self, frame: Frame, random: Random) -> int:
        """Return the id of one of the client's transports, another one than that of ``frame`` if possible."""
        ids = [one for one in self.peer.routes if one != frame.id]
        return random.choice(ids) if ids else frame.id

    def unused_id(self, random: Random) -> int:
        """Return an unused id that the server could choose for a new transport."""
        return next(one for one in iter(lambda: random.randrange(1, ID_COUNT, 2), -1) if one not in self.peer.routes)

    def hold(self, transport_id: int, seconds: float) -> None:
        """Delay all frames of a transport for this number of seconds."""
        self.held.setdefault(transport_id, [])
        self.liar.host.callLater(seconds, self._release, transport_id)

    def _release(self, transport_id: int) -> None:
        if self.peer in self.liar.relay.peers:
            self.put(self.held.pop(transport_id, []))

    def stop_lying(self) -> None:
        """Send the delayed frames, and stop dropping frames and giving them wrong ids."""
        self.to_drop.clear()
        self.swapped.clear()
        following, self.postponed = self.postponed, []
        if self.peer in self.liar.relay.peers:
            self.put(following)
            for transport_id in list(self.held):
                self._release(transport_id)

    def remembered(self, frame_type: int, random: Random) -> bytes | None:
        """Return the payload of a frame of that type that a liar of this lab has seen; None if no liar has seen any."""
        seen = self.liar.alliance.seen[frame_type]
        return random.choice(seen) if seen else None

    def pick_other_port(self, random: Random) -> LyingPort | None:
        """Return the port of another client, drawn at random; None if no other client is connected."""
        others = [one for one in self.liar.peers if one is not self.peer]
        return self.liar.port_of(random.choice(others)) if others else None
