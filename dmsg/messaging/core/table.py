"""Client side of one link: processes received frames and maintains the table of channels.  No I/O, no clock.

:meth:`ClientConnection.receive_frames` processes bytes and returns events. Frames to send are collected until
:meth:`ClientConnection.data_to_send` returns them.  Control frames go through the table of
:mod:`dmsg.messaging.core.state`; for a Send, only one attribute is tested.

A frame that the state of its channel does not allow is ignored and counted.  Only bytes that cannot be a frame end the
link, and the events before them are delivered first.  A Send that is not authentic ends its channel.

The client chooses channel ids from 0 up, and the server first uses those of the upper half (128 to 255). So both can
choose the same id only if about half of all ids are in use. With two ids (:mod:`dmsg.messaging.core.wire`), the two
sides choose their ids independently.

Source: the seed document, sections Opening and Closing a Channel.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

from dmsg.base.eviction import pick_replaced
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
"""Maximum number of open channels that other clients use only to measure a round trip. A further one closes the
oldest."""
JOIN_LIMIT = 64 * 1024
"""Number of bytes above which the joined messages of one channel become an event. This bounds the memory of an
event."""


class ClientConnection:
    """Client side of one link.

    :param two_ids: whether to answer an OpenChannel with two ids (as the Go code does from 2019-03-13 on). Answers to
        this side's own OpenChannels may always have one id or two.
    :param ephemeral: function that returns the ephemeral key of the next handshake; only for tests with recorded keys.
    :param refusal: function that returns why an OpenChannel is refused before any key agreement is computed, or None.
        Its arguments are the initiator's key and the initiator's ephemeral key. For a ping, the ephemeral key is None,
        because a ping uses the initiator's own key in its place.
    :ivar channels: channels by id.
    :ivar accepting: whether other clients may open channels to this client now.
    :ivar drops: number of ignored frames for each reason.
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
        """Error of the peer, after which nothing more can be read from the link. The events before it are delivered
        first."""
        self.has_frames_left = False
        """Whether the last read may have left complete frames unprocessed."""

    def data_to_send(self) -> list[bytes]:
        """Remove and return the frames, and parts of frames, to send, in order."""
        out, self._out = self._out, []
        return out

    # --- called by the application ---

    @property
    def has_free_id(self) -> bool:
        """Whether another channel can be opened."""
        return len(self.channels) < ID_COUNT

    def _free_id(self) -> int:
        free = [number for number in range(ID_COUNT) if number not in self.channels]
        if not free:
            raise LocalProtocolError(f"there is no free channel id: {ID_COUNT} channels are open on this link")
        # If this side sent the last frame of a former channel, the server's ChannelClosed for it may still arrive. It
        # would be taken for the answer to the next channel with that id. So such ids are used last, the oldest first.
        certain = next((number for number in free if number not in self._doubtful), None)
        return certain if certain is not None else next(number for number in self._doubtful if number in free)

    def open(self, remote: PubKey, *, ping: bool = False, report_messages: bool = False) -> ClientChannel:
        """Request a channel to ``remote``.

        :param ping: whether the remote's client answers itself and does not notify its program.
        :param report_messages: whether each message is reported as a separate event.
        :raises LocalProtocolError: all 256 ids are in use; nothing is sent.
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
        """Accept the channel of a :class:`~dmsg.messaging.core.events.Requested` event.

        :raises LocalProtocolError: the channel is not waiting for an answer.
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

        :raises LocalProtocolError: the message is too long, or the channel is not open. The ciphers are unchanged then.
        """
        if channel.state is not State.OPEN:
            raise LocalProtocolError("channel is closed")
        # The size is checked before the encryption. A message that was encrypted and not sent would use up a nonce, and
        # the remote could decrypt no later message of the channel.
        head = send_head(self._profile, channel.name, len(data))
        assert channel.ciphers is not None
        self._out += (head, channel.ciphers.seal(data))

    def close(self, channel: ClientChannel) -> bool:
        """Send CloseChannel. If the channel is still waiting for this side's answer, refuse it instead.

        :returns: whether to expect a ChannelClosed.  If it does not arrive, the caller must call :meth:`give_up`.
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
        """End a channel although its ChannelClosed has not arrived.

        :returns: False if the channel had ended before.
        """
        if channel.state is State.ENDED:
            self._forget(channel)
            return True
        return self._end(channel)

    def _end(self, channel: ClientChannel) -> bool:
        """Send ChannelClosed and end the channel at this side. Return False if it had ended before."""
        if channel.state is State.ABANDONED and self._is_ambiguous(channel):
            # Frames name a channel by ``name``. While two channels have the same name, a ChannelClosed could end the
            # wrong channel. So this channel's id stays in use until the server's answer contains the other id.
            return True
        if not channel.apply(Input.SEND_CLOSED):
            return False
        self._send_closed(channel)
        self._forget(channel)
        return True

    def _is_ambiguous(self, channel: ClientChannel) -> bool:
        """Whether another channel has the same ``name``. If so, the server would apply a CloseChannel for this channel
        to the other one. So this side sends the CloseChannel only after the server's answer to the OpenChannel."""
        return any(one.name == channel.name and one is not channel for one in self.channels.values())

    def _send_closed(self, channel: ClientChannel) -> None:
        self._out.append(encode_closed(self._profile, channel.name))
        self._doubtful.pop(channel.id, None)
        self._doubtful[channel.id] = None

    def _forget(self, channel: ClientChannel) -> None:
        channel.state = State.CLOSED
        channel.ciphers = channel.proposal = channel.offer = None
        if self.channels.get(channel.id) is channel:
            del self.channels[channel.id]

    # --- frames ---

    # This loop sees every frame of the client. It is one function because a call per frame would take longer than all
    # other work. Consecutive messages of one channel are joined into one event, which is delivered before any event of
    # another channel or of a control frame.
    def receive_frames(self, buffer: bytearray, end: int, limit: int = sys.maxsize) -> tuple[int, list[Event]]:  # noqa: C901, PLR0912, PLR0915
        """Process the complete frames at the start of ``buffer``.

        :param limit: maximum number of frames to process.  If it is reached, :attr:`has_frames_left` is True, and the
            caller must pass the rest again.
        :returns: number of bytes processed, and the events. Check :attr:`broken` as well.
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
            # An OpenChannel costs a Diffie-Hellman, so it counts as many frames. Otherwise a read that is full of
            # OpenChannels would block the reactor.
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
            # A Send that is too short for its own header is treated like one that is not authentic.
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
                self._correct_clean_end(body[0], events)
            elif (
                frame_type == CLOSE_CHANNEL
                and len(body) == 1
                and not any(one.named and one.name == body[0] for one in self.channels.values())
            ):
                # The server keeps the id in use until it receives ChannelClosed.
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
            number = self._choose_id(body[0], channel)
            if len(body) != OPEN_BODY_SIZE:
                raise HandshakeError("OpenChannel has a wrong length")
            remote, message = decode_open(body)
            ping = message[:PUBKEY_SIZE] == bytes(remote)
            if not (ping or self.accepting):
                raise HandshakeError("this client accepts no channels")
            if self._refusal(remote, None if ping else message[:PUBKEY_SIZE]) is not None:
                raise HandshakeError("the channel was refused, so its handshake was not checked")
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

    def _choose_id(self, name: int, channel: ClientChannel | None) -> int:
        """Return the id that this side uses for a channel which the server opens.

        :param name: id in the server's OpenChannel.
        :param channel: channel that has the id ``name`` at this side now, or None.
        :raises HandshakeError: the id is in use, or no id is free.
        """
        if self._two_ids:
            # The server's ids are independent of this side's. If the server reuses an id, it has closed the former
            # channel.
            channel = next((one for one in self.channels.values() if one.named and one.name == name), None)
        if channel is not None:
            if not channel.apply(Input.RECV_OPEN):
                raise HandshakeError("the server gave the channel an id that is in use")
            self._forget(channel)
        if name not in self.channels:
            return name
        if not self.has_free_id:
            raise HandshakeError("there is no free channel id")
        return self._free_id()

    def _answer_ping(self, channel: ClientChannel) -> None:
        """Accept a ping: a channel that only measures a round trip, so no program is notified of it. The opener closes
        the channel. If ``MAX_PINGS`` of these channels are open already, the oldest one of a remote is closed here;
        :func:`pick_replaced` returns the remote."""
        pings = [one for one in self._pings if one.state is State.OPEN and self.channels.get(one.id) is one]
        if len(pings) >= MAX_PINGS:
            loser = pick_replaced(Counter(one.remote for one in pings), channel.remote)
            oldest = next(one for one in pings if loser in (None, one.remote))
            pings.remove(oldest)
            self._end(oldest)
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
            # The remote believes that the channel is open. So this side must close the channel, not only remove it from
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
        """Close a channel whose responder answered only after this side had withdrawn its request.

        With two ids, this side learns only from the answer which id the CloseChannel must have.
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
                # The CloseChannel was already sent, with this side's own id, when this side withdrew its request.
                return
        self._out.append(encode_close(self._profile, name))

    def _remote_closes(self, channel: ClientChannel, events: list[Event]) -> None:
        before = channel.state
        if not channel.apply(Input.RECV_CLOSE):
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            return
        self._send_closed(channel)
        if channel.state is State.CLOSED:
            self._forget(channel)
        self._add_end_event(channel, before, events, CloseReason.UNSPECIFIED)

    def _closed(self, channel: ClientChannel, events: list[Event]) -> None:
        before = channel.state
        if not channel.apply(Input.RECV_CLOSED):
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            return
        if before in (State.CLOSING, State.ABANDONED):
            # If this ChannelClosed crossed this side's CloseChannel, the server will answer the latter with another
            # ChannelClosed.
            self._doubtful[channel.id] = None
        self._forget(channel)
        # The remote has sent no CloseChannel, so data of the stream may be missing.
        self._add_end_event(
            channel, before, events, CloseReason.ABORTED if before is State.OPEN else CloseReason.UNSPECIFIED
        )

    @staticmethod
    def _correct_clean_end(number: int, events: list[Event]) -> None:
        """Change the reason of the last event to ``ABORTED`` if it reports a clean end of channel ``number``.

        A server that has lost the remote sends CloseChannel and ChannelClosed together. In that case the remote did not
        close the channel itself.
        """
        last = events[-1] if events else None
        if isinstance(last, Closed) and last.channel.id == number and last.reason is CloseReason.UNSPECIFIED:
            events[-1] = Closed(last.channel, CloseReason.ABORTED)

    @staticmethod
    def _add_end_event(channel: ClientChannel, before: State | None, events: list[Event], reason: CloseReason) -> None:
        if before is State.OPENING:
            events.append(Rejected(channel, "rejected"))
        elif before in (State.OPEN, State.CLOSING, State.OFFERED):
            events.append(Closed(channel, reason))
