"""Client side of one link: processes received frames and maintains the table of channels.  No I/O, no clock.

:meth:`ClientConnection.receive_frames` takes bytes and returns events; frames to send collect until
:meth:`ClientConnection.data_to_send`.  Control frames go through the table of :mod:`dmsg.messaging.core.state`; a Send
tests one attribute.

A frame that does not fit its channel's state is ignored and counted.  Only bytes that cannot be a frame end the link,
and the events before them are delivered first.  A Send that is not authentic ends its channel.

The client chooses channel ids from 0 up, the server from 255 down, so both choose the same id only if the link is
full.  With two ids (:mod:`dmsg.messaging.core.wire`) the ids of the two sides are separate.

Source: the seed document, sections Opening and Closing a Channel.
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
"""Maximum number of channels that others keep open only to measure a round trip; a further one ends the oldest."""
JOIN_LIMIT = 64 * 1024
"""Bytes after which joined messages of one channel become an event, to bound the memory that an event takes."""


class ClientConnection:
    """Client side of one link.

    :param two_ids: whether to answer an OpenChannel with two ids (Go from 2019-03-13 on).  Answers to this side's own
        OpenChannels may have one id or two.
    :param ephemeral: returns the ephemeral key of the next handshake; only for tests with recorded randomness.
    :param refusal: returns why an OpenChannel is refused before any key agreement is computed, or None.  Arguments are
        the initiator's key and its ephemeral key.  The latter is None for a ping, whose ephemeral key is the
        initiator's own key.
    :ivar channels: channels by id.
    :ivar accepting: whether others may open channels to this client now.
    :ivar drops: numbers of ignored frames, by reason.
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
        self._has_partial_frame = False
        self.drops: Counter[DropReason] = Counter()
        self.broken: RemoteProtocolError | None = None
        """Error after which nothing more can be read from the link; the events before it are delivered first."""
        self.has_frames_left = False
        """Whether the last read may have left whole frames behind."""

    def data_to_send(self) -> list[bytes]:
        """Return frames and parts of frames to send, in order, and empty the buffer."""
        out, self._out = self._out, []
        return out

    # --- calls of the application ---

    @property
    def has_free_id(self) -> bool:
        """Whether another channel can be opened."""
        return len(self.channels) < ID_COUNT

    def _free_id(self) -> int:
        free = [number for number in range(ID_COUNT) if number not in self.channels]
        if not free:
            raise LocalProtocolError(f"no free channel id: {ID_COUNT} channels are open on this link")
        # If this side sent the last frame of a former channel, a ChannelClosed may still arrive.  It would be taken for
        # the answer to the next channel of that id.  Such ids are used last, the oldest first.
        certain = next((number for number in free if number not in self._doubtful), None)
        return certain if certain is not None else next(number for number in self._doubtful if number in free)

    def open(self, remote: PubKey, *, ping: bool = False, report_messages: bool = False) -> ClientChannel:
        """Request a channel to ``remote``.

        :param ping: whether the remote's client is to answer itself, without its program.
        :param report_messages: whether to report each message as an event of its own.
        :raises LocalProtocolError: all 256 ids are used; nothing is sent.
        """
        channel = ClientChannel(self._free_id(), remote)
        ephemeral = self._key if ping else self._ephemeral()
        channel.proposal = Proposal(self._key, remote, self._profile, ephemeral=ephemeral)
        channel.reports_messages = report_messages
        channel.named = not self._two_ids
        channel.apply(Input.SEND_OPEN)
        self._doubtful.pop(channel.id, None)
        self.channels[channel.id] = channel
        self._out.append(encode_open(self._profile, channel.id, remote, channel.proposal.message))
        return channel

    def accept(self, channel: ClientChannel) -> None:
        """Answer a :class:`~dmsg.messaging.core.events.Requested`.

        :raises LocalProtocolError: the channel does not wait for an answer.
        """
        if not channel.apply(Input.SEND_OPENED):
            raise LocalProtocolError("this channel is not waiting for an answer")
        assert channel.offer is not None
        channel.ciphers, message = channel.offer.accept()
        channel.offer = None
        own = channel.id if self._two_ids else None
        self._out.append(encode_opened(self._profile, channel.name, message, own))

    def send(self, channel: ClientChannel, data: bytes | memoryview) -> None:
        """Encrypt and queue one message.

        :raises LocalProtocolError: the message is too long, or the channel is not open; the ciphers are unchanged.
        """
        if channel.state is not State.OPEN:
            raise LocalProtocolError("channel is closed")
        # The size is checked before the encryption: a nonce that is used up for a message that is never sent would make
        # all later messages of the channel fail at the remote.
        head = send_head(self._profile, channel.name, len(data))
        assert channel.ciphers is not None
        self._out += (head, channel.ciphers.seal(data))

    def close(self, channel: ClientChannel) -> bool:
        """Send CloseChannel, or refuse the channel if it waits for this side's answer.

        :returns: whether ChannelClosed will follow.  The caller must call :meth:`give_up` if it does not arrive.
        """
        opening = channel.state is State.OPENING
        if channel.apply(Input.SEND_CLOSE):
            if not (opening and self._is_ambiguous(channel)):
                self._out.append(encode_close(self._profile, channel.name))
            return True
        if channel.state is State.OFFERED:
            self._end(channel)
        return False

    def give_up(self, channel: ClientChannel) -> bool:
        """End a channel whose ChannelClosed does not arrive.

        :returns: False if the channel had ended before.
        """
        if channel.state is State.ENDED:
            self._forget(channel)
            return True
        return self._end(channel)

    def _end(self, channel: ClientChannel) -> bool:
        """Send ChannelClosed and end the channel at this side; return False if it had ended before."""
        if channel.state is State.ABANDONED and self._is_ambiguous(channel):
            # Nothing is sent yet: the channel's id stays in use until the server's answer names the other id.
            return True
        if not channel.apply(Input.SEND_CLOSED):
            return False
        self._say_closed(channel)
        self._forget(channel)
        return True

    def _is_ambiguous(self, channel: ClientChannel) -> bool:
        """Whether the server would take ``channel.name`` for another one; CloseChannel then waits for its answer."""
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

    # This loop sees every frame of the client.  It is one function because a call per frame would cost more than the
    # rest of the work.  Consecutive messages of one channel are joined into one event, which is delivered before any
    # event of another channel or of a control frame.
    def receive_frames(self, buffer: bytearray, end: int, limit: int = sys.maxsize) -> tuple[int, list[Event]]:  # noqa: C901, PLR0912, PLR0915
        """Process the whole frames at the start of ``buffer``.

        :param limit: maximum number of frames to process.  If it is reached, :attr:`has_frames_left` is True, and the
            caller passes the rest again.
        :returns: number of bytes processed, and the events; see also :attr:`broken`.
        """
        events: list[Event] = []
        channels = self.channels
        profile = self._profile
        position = 0
        channel: ClientChannel | None = None
        joined: list[bytes] = []
        size_joined = 0
        view = memoryview(buffer)
        if not self._has_partial_frame and end >= HEADER_SIZE:
            self._has_partial_frame = True
            try:
                check_first(profile, buffer)
            except RemoteProtocolError as error:
                self.drops[error.reason] += 1
                self.broken = error
                return 0, events
        while position + HEADER_SIZE <= end and limit:
            limit -= 1
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
                        raise HandshakeError("the sizes of a Send frame and of its message differ")
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
                if to.reports_messages:
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
            # An OpenChannel costs a Diffie-Hellman and so counts as many frames.  Otherwise one read full of them would
            # keep the reactor from all other work.
            if self._handshake_cost:
                limit = max(0, limit - self._handshake_cost)
                self._handshake_cost = 0
        if joined:
            assert channel is not None
            events.append(DataReceived(channel, b"".join(joined)))
        self.has_frames_left = not limit
        return position, events

    def _control(self, frame_type: int, body: bytes, events: list[Event]) -> None:
        if not body or frame_type > SEND:
            self.drops[DropReason.UNKNOWN_FRAME] += 1
            return
        channel = self.channels.get(body[0])
        if frame_type == OPEN_CHANNEL:
            self._requested(body, channel, events)
        elif frame_type == SEND:
            # A Send too short for its own header is treated as one that is not authentic.
            self.drops[DropReason.BAD_FRAME] += 1
            if channel is not None and channel.state in (State.OPEN, State.CLOSING):
                self._end(channel)
                events.append(Closed(channel, CloseReason.NOT_AUTHENTIC))
        elif channel is None:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            if frame_type == CHANNEL_OPENED:
                self._close_late_channel(body, None)
            elif frame_type == CHANNEL_CLOSED:
                self._doubtful.pop(body[0], None)
                self._lost_behind_close(body[0], events)
            elif (
                frame_type == CLOSE_CHANNEL
                and len(body) == 1
                and not any(one.named and one.name == body[0] for one in self.channels.values())
            ):
                # The server keeps the id in use until ChannelClosed arrives.
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
                raise HandshakeError("this client accepts no channels")
            if self._refusal(remote, None if ping else message[:PUBKEY_SIZE]) is not None:
                raise HandshakeError("the channel is refused before its handshake is checked")
            self._handshake_cost += HANDSHAKE_FRAMES
            offered = ClientChannel(number, remote)
            offered.name = body[0]
            offered.offer = Offer(self._key, remote, message, self._profile, ephemeral=self._ephemeral())
        except (HandshakeError, KeyFormatError):
            self.drops[DropReason.REFUSED] += 1
            self._out.append(encode_closed(self._profile, body[0]))
            return
        offered.apply(Input.RECV_OPEN)
        self._doubtful.pop(offered.id, None)
        self.channels[offered.id] = offered
        if ping:
            self._answer_ping(offered)
        else:
            events.append(Requested(offered))

    def _place(self, name: int, channel: ClientChannel | None) -> int:
        """Return the id for a channel that the server calls ``name``.

        :raises HandshakeError: that id is in use, or all ids are.
        """
        if self._two_ids:
            # The server's ids are separate from this side's.  A server that reuses an id has closed its former channel.
            channel = next((one for one in self.channels.values() if one.named and one.name == name), None)
        if channel is not None:
            if not channel.apply(Input.RECV_OPEN):
                raise HandshakeError("the server gave the channel an id that is in use")
            self._forget(channel)
        if name not in self.channels:
            return name
        if not self.has_free_id:
            raise HandshakeError("no free channel id")
        return self._free_id()

    def _answer_ping(self, channel: ClientChannel) -> None:
        """Accept a channel without a program; its opener closes it, or a later ping does."""
        pings = [one for one in self._pings if one.state is State.OPEN and self.channels.get(one.id) is one]
        if len(pings) >= MAX_PINGS:
            self._end(pings.pop(0))
        self._pings = [*pings, channel]
        self.accept(channel)

    def _opened(self, body: bytes, channel: ClientChannel, events: list[Event]) -> None:
        if channel.state is not State.OPENING:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            self._close_late_channel(body, channel)
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
            channel.ciphers = channel.proposal.process_answer(message)
        except HandshakeError as error:
            # The remote believes that the channel is open, so the channel has to be closed, and not only removed from
            # the table.
            self.drops[DropReason.BAD_FRAME] += 1
            channel.apply(Input.SEND_CLOSE)
            self._end(channel)
            events.append(Rejected(channel, f"the answer is not the remote's: {error}"))
            return
        channel.proposal = None
        channel.apply(Input.RECV_OPENED)
        events.append(Opened(channel))

    def _close_late_channel(self, body: bytes, channel: ClientChannel | None) -> None:
        """Close a channel at its responder, whose answer came after this side had given up.

        With two ids, only the answer says which id the CloseChannel must have.
        """
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
                # When this side gave up, it sent the CloseChannel with its own id, which no other channel had.
                return
        self._out.append(encode_close(self._profile, name))

    def _remote_closes(self, channel: ClientChannel, events: list[Event]) -> None:
        before = channel.state
        if not channel.apply(Input.RECV_CLOSE):
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            return
        self._say_closed(channel)
        if channel.state is State.CLOSED:
            self._forget(channel)
        self._tell(channel, before, events, CloseReason.UNSPECIFIED)

    def _closed(self, channel: ClientChannel, events: list[Event]) -> None:
        before = channel.state
        if not channel.apply(Input.RECV_CLOSED):
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            return
        if before in (State.CLOSING, State.ABANDONED):
            # If this ChannelClosed crossed the CloseChannel, the server sends another one as the answer.
            self._doubtful[channel.id] = None
        self._forget(channel)
        # Without a CloseChannel of its own, this side cannot know whether data of the stream are missing.
        self._tell(channel, before, events, CloseReason.ABORTED if before is State.OPEN else CloseReason.UNSPECIFIED)

    @staticmethod
    def _lost_behind_close(number: int, events: list[Event]) -> None:
        """Change a clean end to ``ABORTED`` if the CloseChannel and ChannelClosed of channel ``number`` came together.

        A server sends the two together when it has lost the remote, which has not closed the channel itself.
        """
        last = events[-1] if events else None
        if isinstance(last, Closed) and last.channel.id == number and last.reason is CloseReason.UNSPECIFIED:
            events[-1] = Closed(last.channel, CloseReason.ABORTED)

    @staticmethod
    def _tell(channel: ClientChannel, before: State | None, events: list[Event], reason: CloseReason) -> None:
        if before is State.OPENING:
            events.append(Rejected(channel, "rejected"))
        elif before in (State.OPEN, State.CLOSING, State.OFFERED):
            events.append(Closed(channel, reason))
