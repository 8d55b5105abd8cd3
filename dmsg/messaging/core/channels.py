"""Tables of a messaging server's links and of the channels between them: how a channel opens and ends.  No I/O.

A link's record is a :class:`RelayPeer`; output goes to its :class:`~dmsg.messaging.core.peers.LinkPort`.  A channel is
a pair of :class:`End` objects, one in the table of each link, under the id that the channel has there.
:class:`~dmsg.messaging.core.relay.Relay` adds the processing of frames.

:meth:`ChannelTable.check` checks these invariants: a channel has an end at both links or at neither, and both ends
agree whether it is open.  Output for a slow link is queued in :mod:`dmsg.messaging.core.congestion`.

Source: the seed document, sections Channel Management to Handling Disconnections.  Comments mark where the Go code of
2019 differs.
"""

from __future__ import annotations

from collections.abc import Callable

from dmsg.base.connections import ConnectionTable
from dmsg.errors import DropReason
from dmsg.keys import PubKey
from dmsg.messaging.core.congestion import Congestion, Meter
from dmsg.messaging.core.destinations import PEER_QUEUE_MAXIMUM
from dmsg.messaging.core.peers import End, LinkPort, RelayPeer
from dmsg.messaging.core.wire import (
    ID_COUNT,
    Profile,
    decode_opened,
    encode_close,
    encode_closed,
    encode_open,
    encode_opened,
)

MAX_LINKS_PER_KEY = 4
"""Maximum number of links of one key.  New channels use the newest link; older links keep their channels."""
MAX_KNOWN = 4096
"""Maximum number of clients for which the relay remembers whether their ChannelOpened frames have two ids. Above it,
the oldest record is forgotten."""
IN_FLIGHT = 65_536
"""Number of data frames that a client may send without charge after the other end has closed an open channel.  The
client may have sent them before it received the close, and only TCP bounds their number."""
LATE_ANSWERS = 3
"""Number of control frames that the client may send without charge in addition to the ``IN_FLIGHT`` data frames: one
each of ChannelOpened, CloseChannel and ChannelClosed."""


class ChannelTable(ConnectionTable[RelayPeer]):
    """Tables of the links and channels of one relay."""

    def __init__(
        self,
        profile: Profile,
        *,
        now: Callable[[], float] = lambda: 0.0,
        on_paused: Callable[[RelayPeer], None] = lambda peer: None,
        measure: Callable[[], Meter] | None = None,
        two_ids: bool | None = None,
    ) -> None:
        """:param now: function that returns the seconds of a monotonic clock.

        :param two_ids: whether the relay sends a ChannelOpened with two ids (as the Go code does from 2019-03-13 on) to
            a client that has never answered an OpenChannel itself. With None, it sends as many ids as the answer of the
            other client had. A client that has answered an OpenChannel gets as many ids as it sent then.
        :param on_paused: callback invoked when reading of a link is paused.  The caller must call :meth:`let_read`
            after :data:`~dmsg.messaging.core.congestion.PAUSE_CHECK_INTERVAL` seconds.
        :param measure: see :class:`~dmsg.messaging.core.congestion.Congestion`.
        :raises ValueError: ``two_ids`` is set with :attr:`Profile.SEED`.
        """
        if two_ids and profile is Profile.SEED:
            raise ValueError("two_ids needs the skywire profile")
        super().__init__(MAX_LINKS_PER_KEY)
        self._profile = profile
        self._now = now
        self._two_ids = two_ids
        self._known: dict[bytes, bool] = {}
        self.congestion = Congestion(now, on_paused, self._give_up, measure)
        self.channels_opened = 0
        self.channel_count = 0
        self.draining = False

    # --- links ---

    def add(self, key: PubKey, port: LinkPort) -> RelayPeer:
        """Add a link of the client with ``key``. The link becomes the newest of that key."""
        peer = RelayPeer(key, port)
        peer.two_ids = self._known.get(key)
        self._add_peer(peer)
        return peer

    def remove(self, peer: RelayPeer, limit: int = ID_COUNT) -> bool:
        """Remove a link that has ended, and close its channels at their other ends.

        :param limit: ignored, because a link has at most 256 channels, fewer than a server closes in one reactor turn.
        :returns: True, because all channels are closed in this call, so it need not be repeated.
        """
        if peer not in self.peers:
            return True
        self.connections.remove(peer)
        for end in list(peer.ends.values()):
            self.drops[DropReason.PEER_DISCONNECTED] += 1
            self._close(end, notify=False)
        self.congestion.gone(peer)
        return True

    def close_all(self) -> None:
        """Close all channels and refuse new ones, because the server stops."""
        self.draining = True
        for peer in list(self.peers):
            for end in list(peer.ends.values()):
                if peer.ends.get(end.id) is end:
                    self._close(end)

    def congest(self, peer: RelayPeer) -> None:
        """Queue further output for ``peer`` separately for each channel, because the output queue of its link is above
        the high-water mark."""
        self.congestion.congest(peer)

    def relieve(self, peer: RelayPeer) -> None:
        """Send the backlogs of ``peer``, because the output queue of its link is empty."""
        self.congestion.relieve(peer)

    def let_read(self, peer: RelayPeer) -> None:
        """Check whether reading from a paused link may resume, and resume it then."""
        if peer in self.peers:
            self.congestion.check_source(peer)

    # --- answers ---

    def _send_control(self, end: End, frame: bytes) -> None:
        """Send a control frame of a channel to the client at ``end``, after the channel's queued data."""
        if not self.congestion.queue_control(end, frame):
            self._answer(end.peer, frame)

    def _answer(self, peer: RelayPeer, frame: bytes) -> None:
        peer.port.send(frame)
        # Answers are not in the backlogs, whose size is limited. So without this check, a client that provokes answers
        # and does not read them could fill the server's memory.
        if peer.congested and peer.port.queued() > PEER_QUEUE_MAXIMUM:
            self._end_peer(peer, DropReason.SEND_BUFFER_FULL)

    # --- life of a channel ---

    def _offer(self, here: End, remote: RelayPeer, number: int, message: bytes) -> None:
        """Create a channel, and send its OpenChannel to the client at the other end.

        :param here: end at the link of the opener.
        :param number: id of the channel at ``remote``.
        :param message: Noise message of the opener.
        """
        far = End(remote, number, False)
        here.other, far.other = far, here
        here.peer.ends[here.id] = here
        remote.ends[far.id] = far
        self.channel_count += 1
        self.channels_opened += 1
        self._answer(remote, encode_open(self._profile, number, here.peer.key, message))

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
        self._record_two_ids(end.peer, name is not None)
        if name is not None:
            end.name = name
        other = end.other
        end.open = other.open = True
        end.peer.doubtful.pop(end.id, None)
        # Frames arrive in order. So the client will not answer the CloseChannel of the former channel with this id any
        # more.
        end.peer.answers_due.pop(end.id, None)
        two = other.peer.two_ids
        if two is None:
            two = self._two_ids if self._two_ids is not None else name is not None
        self._answer(other.peer, encode_opened(self._profile, other.name, message, other.id if two else None))

    def _record_two_ids(self, peer: RelayPeer, two_ids: bool) -> None:
        """Remember whether a client uses two ids, for this link and for later links of its key.

        :param two_ids: whether the client's ChannelOpened had two ids.
        """
        peer.two_ids = two_ids
        self._known.pop(peer.key, None)
        self._known[peer.key] = two_ids
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _half_close(self, end: End) -> None:
        if not end.open:
            # The channel is not open yet. Either its opener has withdrawn the request, or its responder has refused the
            # channel with CloseChannel instead of ChannelClosed.
            other = end.other
            self._close(end)
            if end.opener and self._profile is Profile.SKYWIRE and other.peer in self.peers and not other.nameless:
                # Go ignores a ChannelClosed for a channel that it believes to be open, and would keep the id in use for
                # ever.
                self._answer(other.peer, encode_close(self._profile, other.name))
        elif end.closed:
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        else:
            end.closed = True
            self._send_control(end.other, encode_close(self._profile, end.other.name))

    def _close(self, end: End, *, notify: bool = True) -> None:
        """End a channel, and send ChannelClosed to its other end.

        :param notify: whether to send ChannelClosed to ``end``, too.
        """
        other = end.other
        now = self._now()
        for one in (end, other):
            one.peer.provoked.add(LATE_ANSWERS + (IN_FLIGHT if one.open else 0), now)
        self.congestion.forget(end)
        self.congestion.closed(other)
        del end.peer.ends[end.id]
        del other.peer.ends[other.id]
        self.channel_count -= 1
        if notify and not end.nameless:
            self._answer(end.peer, self._closing_frames(other, end))
        if other.peer in self.peers and not other.nameless:
            self._send_control(other, self._closing_frames(end, other))

    def _closing_frames(self, other: End, end: End) -> bytes:
        """Return the frames by which the client at ``end`` learns that the channel has ended: ChannelClosed, and
        sometimes CloseChannel. In the ``skywire`` profile, CloseChannel is sent too for an open channel that neither
        end has closed, because a client in Go would not free the id without it.

        :param other: other end of the channel.
        """
        closed = encode_closed(self._profile, end.name)
        if self._profile is Profile.SEED or not end.open or end.closed or other.closed:
            return closed
        # Go frees the id of an open channel only after a CloseChannel. Without it, a Go client would run out of ids
        # when clients that have opened channels to it disconnect.
        end.peer.answers_due[end.id] = None
        close = encode_close(self._profile, end.name)
        # A client that uses two ids (Go from 2019-03-13 on) takes the id in a ChannelClosed for the channel's other id,
        # so it is sent CloseChannel first. Any other client is sent ChannelClosed first, and learns from this order
        # that the end was not clean.
        return close + closed if end.peer.two_ids else closed + close

    def _give_up(self, end: End, reason: DropReason) -> None:
        """Close the channel of ``end`` and drop its backlog, because the client at the other end reads nothing."""
        self.drops[reason] += 1
        self.congestion.forget(end.other)
        self._close(end)

    def check(self) -> None:
        """Check the invariants; for tests.

        :raises AssertionError: the tables of two links disagree.
        """
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
