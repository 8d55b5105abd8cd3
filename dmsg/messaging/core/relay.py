"""Relay of a messaging server: forwards frames from one link to another, as their channels require. No I/O.

:meth:`Relay.receive_frames` processes the bytes of a link and returns how many it has processed.  The links and their
channels are in the tables of :mod:`dmsg.messaging.core.channels`.

A ChannelClosed ends the channel that its sender has under that id, in any state.  A protocol error raises an exception
that ends only the link of its sender.

Source: the seed document, sections Channel Management to Handling Disconnections.  Comments mark where the Go code of
2019 differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ClassVar

from dmsg.base.buffers import FIRST_BURST, count_equal
from dmsg.errors import DropReason, RemoteProtocolError
from dmsg.messaging.core.channels import ChannelTable
from dmsg.messaging.core.congestion import Meter
from dmsg.messaging.core.destinations import Destinations
from dmsg.messaging.core.peers import End, RelayPeer, descending
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
    read_header,
)

MAX_DOUBTFUL = ID_COUNT // 2
"""Maximum number of ids of a link that are avoided because the client refused a channel with them."""
SAME_HEADERS = ID_OFFSET + 1
"""Number of leading bytes that are equal in data frames of one size and channel: the header and the channel id."""


class Relay(ChannelTable):
    """Relay of one messaging server, with its links and channels.

    :param choose: function that returns a free id for a channel that the server opens to a link, or None if no id is
        free.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        limits: Limits | None = None,
        now: Callable[[], float] = lambda: 0.0,
        choose: Callable[[RelayPeer], int | None] = descending,
        on_paused: Callable[[RelayPeer], None] = lambda peer: None,
        measure: Callable[[], Meter] | None = None,
        two_ids: bool | None = None,
    ) -> None:
        """See :class:`ChannelTable` for ``now``, ``on_paused``, ``measure`` and ``two_ids``."""
        super().__init__(profile, now=now, on_paused=on_paused, measure=measure, two_ids=two_ids)
        self._destinations = Destinations(self.newest, choose)
        self.limits = limits or Limits()
        self.steps = 0
        """Number of frames of the last read that were processed one by one.

        They include ``strays``, data frames without a channel that no other client provoked, and ``refused``,
        OpenChannels above the rate of their destination.
        """
        self.strays = self.refused = 0

    # --- frames ---

    # This loop sees every frame of the server. It is one function because a call per frame would take longer than all
    # other work. Consecutive frames for one link form a run. Their ids are rewritten in place, and the run is sent as
    # one slice of the buffer, so that no frame is copied by itself.
    def receive_frames(self, peer: RelayPeer, buffer: bytearray, end: int, limit: int = sys.maxsize) -> int:  # noqa: C901, PLR0912, PLR0915
        """Process the complete frames at the start of ``buffer``, and rewrite channel ids in place.

        :param limit: maximum number of frames to process one by one: control frames, and data frames of another channel
            than the frame before.
        :returns: number of bytes processed.  The rest is an incomplete frame. If :attr:`steps` equals ``limit``, the
            rest may have complete frames, which the caller must pass again later.
        :raises RemoteProtocolError: ``peer`` violated the protocol; the caller must disconnect it.
        """
        steps = self.strays = self.refused = 0
        ends = peer.ends
        profile = self._profile
        position = start = frames = 0
        run: End | None = None  # The frames from ``start`` to ``position`` are for the link of ``run.other``.
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
                    if run is not None:  # The frames before the error are valid and are still forwarded.
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
                            # A bulk sender fills the buffer with frames of one size and channel. A few calls of C code
                            # compare and rewrite their headers, which is faster than one iteration of this loop per
                            # frame.
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
                # The data frames before this control frame are sent first. Otherwise the control frame could overtake
                # data of its channel.
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
        """Send frames from one link to another. If the receiving link is slow, all frames must belong to one channel.

        :param run: end of a channel at ``source``. All frames go to the link of ``run.other``. If the frames belong to
            several channels, it is the end of any of them.
        """
        self.congestion.forward(source, run.other, data)

    # --- control frames ---

    def _control(self, peer: RelayPeer, frame_type: int, body: bytes) -> None:
        now = self._now()
        if not body or frame_type > SEND:
            self.drops[DropReason.UNKNOWN_FRAME] += 1
            peer.police.allows(Kind.STRAY, self.limits, now)
            return
        self._CONTROL[frame_type](self, peer, body, now)

    # Only OpenChannels and stray frames are charged. Frames that answer or close a channel are not charged, because the
    # channel's opener was charged for its OpenChannel.

    def _on_data(self, peer: RelayPeer, body: bytes, now: float) -> None:
        end = peer.ends.get(body[0])
        if end is not None and len(body) < MIN_SEND_BODY:
            self.drops[DropReason.BAD_FRAME] += 1
            self._close(end)
        else:
            # The channel does not exist, is not open yet, or its sender has closed it. Many data frames may have been
            # in flight when the other end closed the channel. Meanwhile a new channel that is not open yet may have
            # got the same id.
            self.strays += not peer.provoked.take(now)
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1

    def _on_opened(self, peer: RelayPeer, body: bytes, now: float) -> None:
        end = peer.ends.get(body[0])
        fits = end is not None and not end.open and not end.opener
        allowed = fits or self._allows_stray(peer, end, now)
        if end is None:
            self._on_no_channel(peer, CHANNEL_OPENED, body, allowed)
        else:
            self._opened(end, body)

    def _on_close(self, peer: RelayPeer, body: bytes, now: float) -> None:
        answers = peer.answers_due.pop(body[0], body) is None
        end = peer.ends.get(body[0])
        allowed = answers or (end is not None and not end.closed) or self._allows_stray(peer, end, now)
        if end is None:
            self._on_no_channel(peer, CLOSE_CHANNEL, body, allowed)
        elif len(body) != 1:
            self.drops[DropReason.BAD_FRAME] += 1
        else:
            self._half_close(end)

    def _on_closed(self, peer: RelayPeer, body: bytes, now: float) -> None:
        if peer.answers_due.pop(body[0], body) is None:
            # The ChannelClosed answers the CloseChannel of a former channel, so it must not end the current channel
            # with that id.
            return
        end = peer.ends.get(body[0])
        if end is None:
            self._on_no_channel(peer, CHANNEL_CLOSED, body, self._allows_stray(peer, end, now))
            return
        if not end.open and not end.opener:
            # The client may have refused the channel because it believes that the id is in use. So the id is avoided
            # from now on.
            peer.doubtful.pop(end.id, None)
            peer.doubtful[end.id] = None
            if len(peer.doubtful) > MAX_DOUBTFUL:
                del peer.doubtful[next(iter(peer.doubtful))]
        self._close(end, notify=False)

    def _on_no_channel(self, peer: RelayPeer, frame_type: int, body: bytes, allowed: bool) -> None:
        self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        if allowed:
            self._answer_stray(peer, frame_type, body)

    def _allows_stray(self, peer: RelayPeer, end: End | None, now: float) -> bool:
        """Whether an unexpected control frame is within the sender's rate limit, or was provoked by another client."""
        if not self.limits.open_rate or peer.police.within(Kind.STRAY, self.limits.rate(Kind.STRAY), now):
            return True
        if end is None and peer.provoked.take(now):
            return True
        peer.police.refuse(Kind.STRAY, self.limits.flood, now)
        return False

    def _answer_stray(self, peer: RelayPeer, frame_type: int, body: bytes) -> None:
        """Answer a control frame whose channel does not exist. A ChannelClosed gets no answer, so answers cannot
        loop."""
        opened = decode_opened(self._profile, body) if frame_type == CHANNEL_OPENED else None
        if opened is not None and self._profile is Profile.SKYWIRE:
            # The client has accepted a channel whose opener has disconnected meanwhile, so the server now closes the
            # channel. It could not do so before: a client that uses two ids sends the id for the server's frames only
            # in its ChannelOpened.
            peer.two_ids = opened[0] is not None
            name = body[0] if opened[0] is None else opened[0]
            answer = encode_close(self._profile, name)
        elif frame_type == CLOSE_CHANNEL and len(body) == 1:
            # The sender of a CloseChannel keeps the id in use until it receives a ChannelClosed.
            name = body[0]
            answer = encode_closed(self._profile, name)
        else:
            return
        if not any(one.name == name and not one.nameless for one in peer.ends.values()):
            self._answer(peer, answer)

    def _open(self, peer: RelayPeer, body: bytes, now: float) -> None:
        here_id, there = self._destinations.assign_id(peer, body[0])
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
        here = End(peer, here_id, True)
        here.name = body[0]
        self._offer(here, remote, number, message)

    def _refuse(self, peer: RelayPeer, name: int, target: End | None, reason: DropReason, now: float) -> None:
        self.drops[reason] += 1
        if target is not None and not peer.two_ids:
            # The client will take the refusal as the end of the channel that has this id, so the server must end that
            # channel, too.
            self._close(target)
        else:
            self._answer(peer, encode_closed(self._profile, name))
        if reason is DropReason.DESTINATION_RATE:
            self.refused += 1
            peer.police.refuse(Kind.OPEN, self.limits.flood, now)

    _CONTROL: ClassVar[dict[int, Callable[[Relay, RelayPeer, bytes, float], None]]] = {
        OPEN_CHANNEL: _open,
        CHANNEL_OPENED: _on_opened,
        CLOSE_CHANNEL: _on_close,
        CHANNEL_CLOSED: _on_closed,
        SEND: _on_data,
    }
    """Handler of each frame type; data of open channels do not need one."""
