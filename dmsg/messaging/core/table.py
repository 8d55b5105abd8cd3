"""A client's table of channels on one link.  No I/O.

Rules are those of the seed document, sections Opening and Closing a Channel.
What a frame does not fit to is ignored and counted; only what cannot be a frame
at all ends the link.  Channel ids go from 0 up, those that the server chooses
from 255 down, so that both never pick the same until the link is full.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

from dmsg.errors import CloseReason, DropReason, HandshakeError, KeyFormatError, LocalProtocolError, RemoteProtocolError
from dmsg.keys import PUBKEY_SIZE, PubKey, SecKey
from dmsg.messaging.core.agreement import Offer, Proposal
from dmsg.messaging.core.events import Closed, DataReceived, Event, Opened, Rejected, Requested
from dmsg.messaging.core.state import ClientChannel, Input, State
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    HEADER_SIZE,
    ID_COUNT,
    MIN_SEND_BODY,
    OPEN_BODY_SIZE,
    OPEN_CHANNEL,
    SEND,
    SEND_OVERHEAD,
    Profile,
    check_first,
    decode_open,
    decode_opened,
    encode_close,
    encode_closed,
    encode_open,
    encode_opened,
    read_header,
    send_head,
    unpack_send_head,
)
from dmsg.noise.handshake import HANDSHAKE_FRAMES

MAX_PINGS = 8
"""Channels that others opened only to see how long that takes; the oldest ends for another one."""
JOIN_LIMIT = 64 * 1024
"""Bytes of messages of one channel that are given to the application at once."""


class ClientConnection:
    """The channels of one link.

    :param two_ids: answer an OpenChannel with two ids (Go from 2019-03-13 on); what this side opened may be answered
        in either way.
    :param ephemeral: only for tests with recorded randomness.
    :param refusal: returns why a channel that somebody asks for is refused before any key is worked out; of a ping the
        ephemeral is None, for it is the initiator's own key.
    :ivar channels: id -> channel.
    :ivar accepting: whether others may open channels to this client now.
    :ivar drops: what was ignored, by reason.
    """

    def __init__(
        self,
        key: SecKey,
        profile: Profile,
        *,
        two_ids: bool = False,
        ephemeral: Callable[[], SecKey | None] = lambda: None,
        refusal: Callable[[bytes, bytes | None], CloseReason | None] = lambda initiator, ephemeral: None,
    ) -> None:
        self._key = key
        self._two_ids = two_ids
        self._profile = profile
        self._ephemeral = ephemeral
        self._out: list[bytes] = []
        self.channels: dict[int, ClientChannel] = {}
        self._doubtful: dict[int, None] = {}
        self.accepting = False
        self._pings: list[ClientChannel] = []
        self._refusal = refusal
        self._handshake_cost = 0
        self._begun = False
        self.drops: Counter[DropReason] = Counter()
        self.broken: RemoteProtocolError | None = None
        """Why nothing more can be read from the link: what came before is told first."""
        self.left = False
        """The last read may have left whole frames behind."""

    def data_to_send(self) -> list[bytes]:
        """Frames, and parts of frames, in order; empties it."""
        out, self._out = self._out, []
        return out

    # --- what the application does ---

    @property
    def has_free_id(self) -> bool:
        """Another channel can be opened."""
        return len(self.channels) < ID_COUNT

    def _free_id(self) -> int:
        free = [number for number in range(ID_COUNT) if number not in self.channels]
        if not free:
            raise LocalProtocolError(f"no free channel id: {ID_COUNT} channels are open on this link")
        # where this side had the last word a ChannelClosed may still come, and would be taken
        # for an answer to the next channel: such an id is taken last, the oldest first
        certain = next((number for number in free if number not in self._doubtful), None)
        return certain if certain is not None else next(number for number in self._doubtful if number in free)

    def open(self, remote: PubKey, *, ping: bool = False, whole: bool = False) -> ClientChannel:
        """Ask for a channel to ``remote``.

        :param ping: its client is to answer itself, below its program.
        :param whole: tell its messages one by one.
        :raises LocalProtocolError: all 256 ids are used; nothing is sent.
        """
        channel = ClientChannel(self._free_id(), remote)
        ephemeral = self._key if ping else self._ephemeral()
        channel.proposal = Proposal(self._key, remote, self._profile, ephemeral=ephemeral)
        channel.whole = whole
        channel.named = not self._two_ids
        channel.moves(Input.SEND_OPEN)
        self._doubtful.pop(channel.id, None)
        self.channels[channel.id] = channel
        self._out.append(encode_open(self._profile, channel.id, remote, channel.proposal.message))
        return channel

    def accept(self, channel: ClientChannel) -> None:
        """Answer a :class:`~dmsg.messaging.core.events.Requested`.

        :raises LocalProtocolError: it is not, or no longer, to be answered.
        """
        if not channel.moves(Input.SEND_OPENED):
            raise LocalProtocolError("this channel is not waiting for an answer")
        assert channel.offer is not None
        channel.ciphers, message = channel.offer.accept()
        channel.offer = None
        own = channel.id if self._two_ids else None
        self._out.append(encode_opened(self._profile, channel.name, message, own))

    def send(self, channel: ClientChannel, data: bytes | memoryview) -> None:
        """One message.

        :raises LocalProtocolError: too long, or the channel is not open; the ciphers are as before.
        """
        if channel.state is not State.OPEN:
            raise LocalProtocolError("channel is closed")
        head = send_head(self._profile, channel.name, len(data))
        assert channel.ciphers is not None
        self._out += (head, channel.ciphers.seal(data))

    def close(self, channel: ClientChannel) -> bool:
        """Say that nothing more comes; reject it, if it waits for an answer.

        :returns: whether ChannelClosed is to be waited for, and :meth:`give_up` to be called
            when it does not come.
        """
        opening = channel.state is State.OPENING
        if channel.moves(Input.SEND_CLOSE):
            if not (opening and self._is_ambiguous(channel)):
                self._out.append(encode_close(self._profile, channel.name))
            return True
        if channel.state is State.OFFERED:
            self._end(channel)
        return False

    def give_up(self, channel: ClientChannel) -> bool:
        """ChannelClosed does not come: the channel ends without it.

        :returns: False when it had ended before.
        """
        if channel.state is State.ENDED:
            self._forget(channel)
            return True
        return self._end(channel)

    def _end(self, channel: ClientChannel) -> bool:
        """ChannelClosed goes out: it is over at this end."""
        if channel.state is State.ABANDONED and self._is_ambiguous(channel):
            return True  # its id stays in use until the server has answered
        if not channel.moves(Input.SEND_CLOSED):
            return False
        self._say_closed(channel)
        self._forget(channel)
        return True

    def _is_ambiguous(self, channel: ClientChannel) -> bool:
        """By the only id that the server could be told it would take another channel: it is told when it answers."""
        return any(one.name == channel.name and one is not channel for one in self.channels.values())

    def _say_closed(self, channel: ClientChannel) -> None:
        self._out.append(encode_closed(self._profile, channel.name))
        self._doubtful.pop(channel.id, None)
        self._doubtful[channel.id] = None

    def _forget(self, channel: ClientChannel) -> None:
        channel.state = State.CLOSED
        channel.ciphers = channel.proposal = channel.offer = None
        if self.channels.get(channel.id) is channel:
            del self.channels[channel.id]

    # --- frames ---

    # Hot loop: a call would cost more than what a frame needs.
    def receive_frames(self, buffer: bytearray, end: int, most: int = sys.maxsize) -> tuple[int, list[Event]]:  # noqa: C901, PLR0912, PLR0915
        """Take the whole frames at the start of ``buffer``.

        :param most: frames that are taken; then :attr:`left` says that there may be more, to be offered again.
        :returns: how many bytes were taken, and what happened; see :attr:`broken` too.
        """
        events: list[Event] = []
        channels = self.channels
        profile = self._profile
        position = 0
        channel: ClientChannel | None = None
        joined: list[bytes] = []
        size_joined = 0
        view = memoryview(buffer)
        if not self._begun and end >= HEADER_SIZE:
            self._begun = True
            try:
                check_first(profile, buffer)
            except RemoteProtocolError as error:
                self.drops[error.reason] += 1
                self.broken = error
                return 0, events
        while position + HEADER_SIZE <= end and most:
            most -= 1
            try:
                frame_type, size = read_header(profile, buffer, position)
            except RemoteProtocolError as error:
                self.drops[error.reason] += 1
                self.broken = error
                break
            body = position + HEADER_SIZE
            following = body + size
            if following > end:
                break
            position = following
            if frame_type == SEND and size >= MIN_SEND_BODY:
                number, length = unpack_send_head(buffer, body)
                to = channels.get(number)
                if to is not channel or size_joined > JOIN_LIMIT:
                    if joined:
                        assert channel is not None
                        events.append(DataReceived(channel, b"".join(joined)))
                        joined = []
                        size_joined = 0
                    channel = to
                if to is None or (to.state is not State.OPEN and to.state is not State.CLOSING):
                    self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
                    continue
                assert to.ciphers is not None
                try:
                    if length != size - SEND_OVERHEAD:
                        raise HandshakeError("message has a wrong length")
                    data = to.ciphers.open(view[body + SEND_OVERHEAD : following])
                except HandshakeError:
                    if joined:
                        events.append(DataReceived(to, b"".join(joined)))
                        joined = []
                    self._end(to)
                    self.drops[DropReason.BAD_FRAME] += 1
                    events.append(Closed(to, CloseReason.NOT_AUTHENTIC))
                    channel = None
                    continue
                if to.whole:
                    events.append(DataReceived(to, data))
                    continue
                joined.append(data)
                size_joined += length
                continue
            if joined:
                assert channel is not None
                events.append(DataReceived(channel, b"".join(joined)))
                joined = []
                size_joined = 0
            channel = None
            self._control(frame_type, bytes(view[body:following]), events)
            if self._handshake_cost:
                most = max(0, most - self._handshake_cost)
                self._handshake_cost = 0
        if joined:
            assert channel is not None
            events.append(DataReceived(channel, b"".join(joined)))
        self.left = not most
        return position, events

    def _control(self, frame_type: int, body: bytes, events: list[Event]) -> None:
        if not body or frame_type > SEND:
            self.drops[DropReason.UNKNOWN_FRAME] += 1
            return
        channel = self.channels.get(body[0])
        if frame_type == OPEN_CHANNEL:
            self._requested(body, channel, events)
        elif frame_type == SEND:
            # too short to be one: as if it were not authentic
            self.drops[DropReason.BAD_FRAME] += 1
            if channel is not None and channel.state in (State.OPEN, State.CLOSING):
                self._end(channel)
                events.append(Closed(channel, CloseReason.NOT_AUTHENTIC))
        elif channel is None:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            if frame_type == CHANNEL_OPENED:
                self._too_late(body, None)
            elif frame_type == CHANNEL_CLOSED:
                self._doubtful.pop(body[0], None)
                self._lost_behind_close(body[0], events)
            elif (
                frame_type == CLOSE_CHANNEL
                and len(body) == 1
                and not any(one.named and one.name == body[0] for one in self.channels.values())
            ):
                # its sender waits for this
                self._out.append(encode_closed(self._profile, body[0]))
        elif frame_type == CHANNEL_OPENED:
            self._opened(body, channel, events)
        elif len(body) != 1:
            self.drops[DropReason.BAD_FRAME] += 1
        elif frame_type == CLOSE_CHANNEL:
            self._remote_closes(channel, events)
        else:
            assert frame_type == CHANNEL_CLOSED
            self._closed(channel, events)

    def _requested(self, body: bytes, channel: ClientChannel | None, events: list[Event]) -> None:
        try:
            number = self._place(body[0], channel)
            if len(body) != OPEN_BODY_SIZE:
                raise HandshakeError("OpenChannel has a wrong length")
            remote, message = decode_open(body)
            ping = message[:PUBKEY_SIZE] == bytes(remote)
            if not (ping or self.accepting):
                raise HandshakeError("nobody listens")
            if self._refusal(remote, None if ping else message[:PUBKEY_SIZE]) is not None:
                raise HandshakeError("not looked at")
            self._handshake_cost += HANDSHAKE_FRAMES
            offered = ClientChannel(number, remote)
            offered.name = body[0]
            offered.offer = Offer(self._key, remote, message, self._profile, ephemeral=self._ephemeral())
        except (HandshakeError, KeyFormatError):
            self.drops[DropReason.REFUSED] += 1
            self._out.append(encode_closed(self._profile, body[0]))
            return
        offered.moves(Input.RECV_OPEN)
        self._doubtful.pop(offered.id, None)
        self.channels[offered.id] = offered
        if ping:
            self._answer_ping(offered)
        else:
            events.append(Requested(offered))

    def _place(self, name: int, channel: ClientChannel | None) -> int:
        """The id for a channel that the server names so.

        :raises HandshakeError: it is in use, or all are.
        """
        if self._two_ids:
            # the server's names are no ids of this side; one that it uses again is of a channel that is over
            channel = next((one for one in self.channels.values() if one.named and one.name == name), None)
        if channel is not None:
            if not channel.moves(Input.RECV_OPEN):
                raise HandshakeError("channel id is in use")
            self._forget(channel)
        if name not in self.channels:
            return name
        if not self.has_free_id:
            raise HandshakeError("no free channel id")
        return self._free_id()

    def _answer_ping(self, channel: ClientChannel) -> None:
        """Open it, without a program; its opener closes it.  Those that are not closed make room for others."""
        pings = [one for one in self._pings if one.state is State.OPEN and self.channels.get(one.id) is one]
        if len(pings) >= MAX_PINGS:
            self._end(pings.pop(0))
        self._pings = [*pings, channel]
        self.accept(channel)

    def _opened(self, body: bytes, channel: ClientChannel, events: list[Event]) -> None:
        if channel.state is not State.OPENING:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            self._too_late(body, channel)
            return
        assert channel.proposal is not None
        try:
            opened = decode_opened(self._profile, body)
            if opened is None:
                raise HandshakeError("ChannelOpened has a wrong length")
            name, message = opened
            if name is not None:
                channel.name = name
            channel.named = True
            channel.ciphers = channel.proposal.accepted(message)
        except HandshakeError as error:
            # what the other end believes to be open has to end
            self.drops[DropReason.BAD_FRAME] += 1
            channel.moves(Input.SEND_CLOSE)
            self._end(channel)
            events.append(Rejected(channel, f"the answer is not the remote's: {error}"))
            return
        channel.proposal = None
        channel.moves(Input.RECV_OPENED)
        events.append(Opened(channel))

    def _too_late(self, body: bytes, channel: ClientChannel | None) -> None:
        """An answer with two ids for which nobody waits any more: only now it is known by which id to say so."""
        opened = decode_opened(self._profile, body)
        if opened is None or opened[0] is None:
            return
        name = opened[0]
        if any(one.named and one.name == name for one in self.channels.values()):
            return
        if channel is not None and channel.state is State.ABANDONED and not channel.named:
            told = not self._is_ambiguous(channel)
            channel.name, channel.named = name, True
            if told:
                return  # by an id that the server took for this one
        self._out.append(encode_close(self._profile, name))

    def _remote_closes(self, channel: ClientChannel, events: list[Event]) -> None:
        before = channel.state
        if not channel.moves(Input.RECV_CLOSE):
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            return
        self._say_closed(channel)
        if channel.state is State.CLOSED:
            self._forget(channel)
        self._tell(channel, before, events, CloseReason.UNSPECIFIED)

    def _closed(self, channel: ClientChannel, events: list[Event]) -> None:
        before = channel.state
        if not channel.moves(Input.RECV_CLOSED):
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            return
        if before in (State.CLOSING, State.ABANDONED):
            # a CloseChannel that crossed an unasked ChannelClosed is answered too
            self._doubtful[channel.id] = None
        self._forget(channel)
        # who has not asked for it cannot know what of the stream is missing
        self._tell(channel, before, events, CloseReason.ABORTED if before is State.OPEN else CloseReason.UNSPECIFIED)

    @staticmethod
    def _lost_behind_close(number: int, events: list[Event]) -> None:
        """A server says CloseChannel and ChannelClosed of one channel: its remote is lost, and has closed nothing."""
        last = events[-1] if events else None
        if isinstance(last, Closed) and last.channel.id == number and last.reason is CloseReason.UNSPECIFIED:
            events[-1] = Closed(last.channel, CloseReason.ABORTED)

    @staticmethod
    def _tell(channel: ClientChannel, before: State | None, events: list[Event], reason: CloseReason) -> None:
        if before is State.OPENING:
            events.append(Rejected(channel, "rejected"))
        elif before in (State.OPEN, State.CLOSING, State.OFFERED):
            events.append(Closed(channel, reason))
