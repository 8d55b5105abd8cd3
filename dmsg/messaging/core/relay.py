"""What a messaging server does with frames.  No I/O.

A :class:`RelayPeer` is one link; what goes to it is handed to its
:class:`~dmsg.messaging.core.peers.LinkPort`.  A channel is two :class:`End` objects, one in the table of each
link, under the id that the channel has there.

Rules: the seed document, sections Channel Management to Handling
Disconnections.  An end exists at both links or at neither
(:meth:`Relay.check`); a ChannelClosed ends whatever its sender had there.

What a receiver does not take at once waits in :mod:`dmsg.messaging.core.congestion`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

from dmsg.base.buffers import count_equal
from dmsg.base.connections import ConnectionTable
from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.keys import PubKey
from dmsg.messaging.core.congestion import Congestion
from dmsg.messaging.core.destinations import PEER_QUEUE_MAXIMUM, Destinations
from dmsg.messaging.core.peers import End, LinkPort, RelayPeer, descending
from dmsg.messaging.core.policing import Kind, Limits
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    HEADER_SIZE,
    ID_COUNT,
    ID_OFFSET,
    MIN_SEND_BODY,
    OPEN_CHANNEL,
    SEND,
    Profile,
    check_first,
    decode_opened,
    encode_close,
    encode_closed,
    encode_open,
    encode_opened,
    read_header,
)

MAX_LINKS_PER_KEY = 4
"""Older links of a key keep their channels, but no more than these in all."""
MAX_DOUBTFUL = ID_COUNT // 2
"""Ids of a link that its client refused and may never give back."""
MAX_KNOWN = 4096
"""Keys of which a relay keeps whether they speak of two ids; the one that said so longest ago is forgotten."""
IN_FLIGHT = 65_536
"""Frames of an open channel that a client may have on their way when others end it: TCP alone bounds them."""
LATE_ANSWERS = 3
"""Control frames that may be on their way besides: ChannelOpened, CloseChannel, ChannelClosed."""
SAME_HEADERS = ID_OFFSET + 1
"""Bytes in which frames of one size and one channel are equal."""
FIRST_BURST = 16
"""Frames of one size that are looked for at first; doubles while they are found."""


class Relay(ConnectionTable[RelayPeer]):
    """The table of a messaging server.

    :param choose: the id for a channel that is opened to a link; None when none is free.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        limits: Limits | None = None,
        now: Callable[[], float] = lambda: 0.0,
        choose: Callable[[RelayPeer], int | None] = descending,
        on_paused: Callable[[RelayPeer], None] = lambda peer: None,
        two_ids: bool | None = None,
    ) -> None:
        """:param now: seconds of a monotonic clock.

        :param two_ids: whether a client that has never answered an OpenChannel is told two ids in a ChannelOpened
            (Go from 2019-03-13 on); None: what the other end of its channel does.  Those that have answered are
            spoken to as they speak.
        :raises ValueError: two ids in the seed profile.
        :param on_paused: told that a link is read no more, so that :meth:`let_read` can follow after
            :data:`~dmsg.messaging.core.congestion.HOLD` seconds.
        """
        if two_ids and profile is Profile.SEED:
            raise ValueError("two ids are of the skywire profile")
        super().__init__(MAX_LINKS_PER_KEY)
        self._profile = profile
        self._now = now
        self._two_ids = two_ids
        self._known: dict[bytes, bool] = {}
        self._destinations = Destinations(self.newest, choose)
        self.congestion = Congestion(now, on_paused, self._give_up)
        self.limits = limits or Limits()
        self.channels_opened = 0
        self.channel_count = 0
        self.draining = False
        self.steps = 0
        """Frames that the last read had handled one by one; ``strays``: data among them of no channel, which nobody
        provoked; ``refused``: OpenChannels beyond the rate of their destination."""
        self.strays = self.refused = 0

    # --- links ---

    def add(self, key: PubKey, port: LinkPort) -> RelayPeer:
        """A link of ``key`` is there; it is the newest of that key from now on."""
        peer = RelayPeer(key, port)
        peer.two_ids = self._known.get(key)
        self._add_peer(peer)
        return peer

    def remove(self, peer: RelayPeer, most: int = ID_COUNT) -> bool:
        """The link ended: its channels, of which there are few, are closed at their other ends; True."""
        if peer not in self.peers:
            return True
        self.connections.remove(peer)
        for end in list(peer.ends.values()):
            self.drops[DropReason.PEER_DISCONNECTED] += 1
            self._close(end, tell=False)
        self.congestion.gone(peer)
        return True

    def close_all(self) -> None:
        """Close every channel, take no new ones."""
        self.draining = True
        for peer in list(self.peers):
            for end in list(peer.ends.values()):
                if peer.ends.get(end.id) is end:
                    self._close(end)

    # --- frames ---

    # Hot loop: a call would cost more than what a frame needs.
    def receive_frames(self, peer: RelayPeer, buffer: bytearray, end: int, limit: int = sys.maxsize) -> int:  # noqa: C901, PLR0912, PLR0915
        """Take the whole frames at the start of ``buffer``; ids are rewritten in place.

        :param limit: frames that are handled one by one: control frames, and those that go elsewhere than the ones
            before them.
        :returns: how many bytes were taken; the rest is an unfinished frame, or, when :attr:`steps` is ``limit``, what
            is to be offered again.
        :raises RemoteProtocolError: ``peer`` has to be disconnected.
        """
        steps = self.strays = self.refused = 0
        ends = peer.ends
        profile = self._profile
        position = start = frames = 0
        run: End | None = None  # whose frames lie from start to position
        last = -1
        burst = FIRST_BURST
        view = memoryview(buffer)
        if not peer.frames_in and end >= HEADER_SIZE:
            check_first(profile, buffer)
        try:
            while position + HEADER_SIZE <= end:
                try:
                    frame_type, size = read_header(profile, buffer, position)
                except RemoteProtocolError:
                    if run is not None:  # what came before is passed on
                        self._forward(peer, run, view[start:position])
                    raise
                following = position + HEADER_SIZE + size
                if following > end:
                    break
                frames += 1
                if frame_type == SEND and size >= MIN_SEND_BODY:
                    number = buffer[position + ID_OFFSET]
                    source = ends.get(number)
                    if source is not None and source.open and not source.closed:
                        other = source.other
                        if source is not run:
                            if steps >= limit:
                                frames -= 1
                                break
                            steps += 1
                            if run is not None and (other.peer is not run.other.peer or other.peer.slow):
                                self._forward(peer, run, view[start:position])
                                start = position
                            elif run is None:
                                start = position
                            run = source
                        step = following - position
                        if step == last:
                            # perhaps many frames of one size and channel: a stride
                            most = min((end - position) // step, burst)
                            if most >= FIRST_BURST:
                                count = count_equal(buffer, position, step, most, SAME_HEADERS)
                                burst = burst * 2 if count == most else FIRST_BURST
                                following = position + count * step
                                frames += count - 1
                                buffer[position + ID_OFFSET : following : step] = bytes((other.name,)) * count
                                position = following
                                continue
                        last = step
                        buffer[position + ID_OFFSET] = other.name
                        position = following
                        continue
                # everything else leaves the fast path: first what came before it
                if steps >= limit:
                    frames -= 1
                    break
                steps += 1
                if run is not None:
                    self._forward(peer, run, view[start:position])
                    run = None
                last = -1
                body = bytes(view[position + HEADER_SIZE : following])
                position = following
                self._control(peer, frame_type, body)
        finally:
            peer.frames_in += frames
            peer.bytes_in += position
            self.steps = steps
        if run is not None:
            self._forward(peer, run, view[start:position])
        return position

    def _forward(self, source: RelayPeer, run: End, data: memoryview) -> None:
        """Frames of one or more channels to one and the same link; of one channel, if that link is slow."""
        self.congestion.forward(source, run.other, data)

    def congest(self, peer: RelayPeer) -> None:
        """More waits for ``peer`` than it takes."""
        self.congestion.congest(peer)

    def relieve(self, peer: RelayPeer) -> None:
        """All of it is sent."""
        self.congestion.relieve(peer)

    def let_read(self, peer: RelayPeer) -> None:
        """Time has passed for a link that is read no more."""
        if peer in self.peers:
            self.congestion.look(peer)

    def _give_up(self, end: End, reason: DropReason) -> None:
        """The other end of a channel takes nothing."""
        self.drops[reason] += 1
        self.congestion.forget(end.other)
        self._close(end)

    # --- control frames ---

    def _say(self, end: End, frame: bytes) -> None:
        """A control frame of a channel: behind its data."""
        if not self.congestion.say(end, frame):
            self._answer(end.peer, frame)

    def _answer(self, peer: RelayPeer, frame: bytes) -> None:
        peer.port.send(frame)
        if peer.congested and peer.port.queued() > PEER_QUEUE_MAXIMUM:
            self._end_peer(peer, DropReason.SEND_BUFFER_FULL)

    def _control(self, peer: RelayPeer, frame_type: int, body: bytes) -> None:
        now = self._now()
        if not body or frame_type > SEND:
            self.drops[DropReason.UNKNOWN_FRAME] += 1
            peer.police.allows(Kind.STRAY, self.limits, now)
            return
        self._CONTROL[frame_type](self, peer, body, now)

    # What ends or answers a channel is paid for by the OpenChannel of whoever opened it.

    def _on_data(self, peer: RelayPeer, body: bytes, now: float) -> None:
        end = peer.ends.get(body[0])
        if end is not None and len(body) < MIN_SEND_BODY:
            self.drops[DropReason.BAD_FRAME] += 1
            self._close(end)
        else:
            # of a channel that is not there, not open yet, or closed by its sender: a lot of it may be on its way,
            # also where whoever closed the channel has opened another one, which has the same id
            self.strays += not peer.provoked.take(now)
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1

    def _on_opened(self, peer: RelayPeer, body: bytes, now: float) -> None:
        end = peer.ends.get(body[0])
        fits = end is not None and not end.open and not end.opener
        allowed = fits or self._allows_stray(peer, end, now)
        if end is None:
            self._of_no_channel(peer, CHANNEL_OPENED, body, allowed)
        else:
            self._opened(end, body)

    def _on_close(self, peer: RelayPeer, body: bytes, now: float) -> None:
        answers = peer.answers_due.pop(body[0], body) is None
        end = peer.ends.get(body[0])
        allowed = answers or (end is not None and not end.closed) or self._allows_stray(peer, end, now)
        if end is None:
            self._of_no_channel(peer, CLOSE_CHANNEL, body, allowed)
        elif len(body) != 1:
            self.drops[DropReason.BAD_FRAME] += 1
        else:
            self._closing(end)

    def _on_closed(self, peer: RelayPeer, body: bytes, now: float) -> None:
        if peer.answers_due.pop(body[0], body) is None:
            return  # to the CloseChannel of a channel that is over: nothing of another one
        end = peer.ends.get(body[0])
        if end is None:
            self._of_no_channel(peer, CHANNEL_CLOSED, body, self._allows_stray(peer, end, now))
            return
        if not end.open and not end.opener:
            peer.doubtful.pop(end.id, None)
            peer.doubtful[end.id] = None
            if len(peer.doubtful) > MAX_DOUBTFUL:
                del peer.doubtful[next(iter(peer.doubtful))]
        self._close(end, tell=False)

    def _of_no_channel(self, peer: RelayPeer, frame_type: int, body: bytes, allowed: bool) -> None:
        self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        if allowed:
            self._stray(peer, frame_type, body)

    def _allows_stray(self, peer: RelayPeer, end: End | None, now: float) -> bool:
        """Whether a control frame of no channel, or that does not fit it, is within its rate, or was provoked."""
        if not self.limits.open_rate or peer.police.within(Kind.STRAY, self.limits.rate(Kind.STRAY), now):
            return True
        if end is None and peer.provoked.take(now):
            return True
        peer.police.refuse(Kind.STRAY, self.limits.flood, now)
        return False

    def _stray(self, peer: RelayPeer, frame_type: int, body: bytes) -> None:
        """Of a channel that is not there; ChannelClosed is never answered."""
        opened = decode_opened(self._profile, body) if frame_type == CHANNEL_OPENED else None
        if opened is not None and self._profile is Profile.SKYWIRE:
            # whoever asked has gone; with two ids it is only now known by which one the client can be told
            peer.two_ids = opened[0] is not None
            name = body[0] if opened[0] is None else opened[0]
            answer = encode_close(self._profile, name)
        elif frame_type == CLOSE_CHANNEL and len(body) == 1:
            # its sender waits for this
            name = body[0]
            answer = encode_closed(self._profile, name)
        else:
            return
        if not any(one.name == name and not one.nameless for one in peer.ends.values()):
            self._answer(peer, answer)

    def _open(self, peer: RelayPeer, body: bytes, now: float) -> None:
        here_id, there = self._destinations.place(peer, body[0])
        found: tuple[RelayPeer, int, bytes] | DropReason
        if not peer.police.allows(Kind.OPEN, self.limits, now):
            found = DropReason.RATE_LIMITED
        elif there is not None or here_id is None:
            found = DropReason.ID_IN_USE
        elif self.draining:
            found = DropReason.DRAINING
        else:
            found = self._destinations.find(peer, body, self.limits, now)
        if isinstance(found, DropReason):
            self._refuse(peer, body[0], there, found, now)
            return
        assert here_id is not None
        remote, number, message = found
        here, far = End(peer, here_id, True), End(remote, number, False)
        here.name = body[0]
        here.other, far.other = far, here
        peer.ends[here.id] = here
        remote.ends[far.id] = far
        self.channel_count += 1
        self.channels_opened += 1
        self._answer(remote, encode_open(self._profile, number, peer.key, message))

    def _refuse(self, peer: RelayPeer, name: int, there: End | None, reason: DropReason, now: float) -> None:
        self.drops[reason] += 1
        if there is not None and not peer.two_ids:
            # a ChannelClosed with this id ends what its receiver has there: so does it here
            self._close(there)
        else:
            self._answer(peer, encode_closed(self._profile, name))
        if reason is DropReason.DESTINATION_RATE:
            self.refused += 1
            peer.police.refuse(Kind.OPEN, self.limits.flood, now)

    def _opened(self, end: End, body: bytes) -> None:
        if end.open or end.opener:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            return
        opened = decode_opened(self._profile, body)
        if opened is None:
            self.drops[DropReason.BAD_FRAME] += 1
            self._close(end)
            return
        name, message = opened
        self._learn(end.peer, name is not None)
        if name is not None:
            end.name = name
        other = end.other
        end.open = other.open = True
        end.peer.doubtful.pop(end.id, None)
        end.peer.answers_due.pop(end.id, None)  # the answer that was due would have come before this one
        two = other.peer.two_ids
        if two is None:
            two = self._two_ids if self._two_ids is not None else name is not None
        self._answer(other.peer, encode_opened(self._profile, other.name, message, other.id if two else None))

    def _learn(self, peer: RelayPeer, two_ids: bool) -> None:
        """What a client's answers look like says what it expects in those to it."""
        peer.two_ids = two_ids
        self._known.pop(peer.key, None)
        self._known[peer.key] = two_ids
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _closing(self, end: End) -> None:
        if not end.open:
            # the opener gives up, or the remote misuses it for a refusal
            other = end.other
            self._close(end)
            if end.opener and self._profile is Profile.SKYWIRE and other.peer in self.peers and not other.nameless:
                # Go takes no notice of a ChannelClosed for what it believes to be open, and keeps the id for ever
                self._answer(other.peer, encode_close(self._profile, other.name))
        elif end.closed:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        else:
            end.closed = True
            self._say(end.other, encode_close(self._profile, end.other.name))

    def _close(self, end: End, *, tell: bool = True) -> None:
        """A channel is over: ChannelClosed for its other end, and for this one if it is to be told."""
        other = end.other
        now = self._now()
        for one in (end, other):
            one.peer.provoked.add(LATE_ANSWERS + (IN_FLIGHT if one.open else 0), now)
        self.congestion.forget(end)
        self.congestion.closed(other)
        del end.peer.ends[end.id]
        del other.peer.ends[other.id]
        self.channel_count -= 1
        if tell and not end.nameless:
            self._answer(end.peer, self._last_words(other, end))
        if other.peer in self.peers and not other.nameless:
            self._say(other, self._last_words(end, other))

    def _last_words(self, other: End, end: End) -> bytes:
        """What ``end`` is told of a channel that is over: ChannelClosed, and what Go needs besides.

        :param other: the channel's other end.
        """
        closed = encode_closed(self._profile, end.name)
        if self._profile is Profile.SEED or not end.open or end.closed or other.closed:
            return closed
        # Go frees an id of an open channel for a CloseChannel alone; without it an acceptor runs out of ids when
        # those who open channels to it disconnect
        end.peer.answers_due[end.id] = None
        close = encode_close(self._profile, end.name)
        # with two ids, Go takes the id in a ChannelClosed for the one by which it names the channel: it must not
        # see that first.  Others learn by a ChannelClosed that comes first that this is no clean end.
        return close + closed if end.peer.two_ids else closed + close

    _CONTROL: ClassVar[dict[int, Callable[[Relay, RelayPeer, bytes, float], None]]] = {
        OPEN_CHANNEL: _open,
        CHANNEL_OPENED: _on_opened,
        CLOSE_CHANNEL: _on_close,
        CHANNEL_CLOSED: _on_closed,
        SEND: _on_data,
    }
    """Handlers of the frames that are not passed on as data of an open channel."""

    # --- for tests ---

    def check(self) -> None:
        """:raises AssertionError: the two sides of the table disagree."""
        ends = 0
        for peer in self.peers:
            for number, end in peer.ends.items():
                ends += 1
                assert end.id == number and end.peer is peer
                assert end.other.other is end and end.other.peer.ends[end.other.id] is end.other
                assert end.other.peer in self.peers and end.open == end.other.open
        assert ends == 2 * self.channel_count
        self.congestion.check(self.peers)
        self.connections.check()
