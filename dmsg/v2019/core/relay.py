"""Relay of a server: forwards frames by transport id, and refuses frames that it does not accept. No I/O.

The protocol class passes plaintext to :meth:`Relay.receive_frames`, which returns only the number of processed bytes.
Output goes to the port of the receiving connection. A protocol error raises an exception, which ends the connection of
that peer only. The tables of connections and routes, and their invariants, are in :mod:`dmsg.v2019.core.routes`.

The frames of one transport stay in order, and a control frame never overtakes data of its transport. The relay does not
change payloads, and cannot read those of secure transports. Every frame that it drops is counted under a
:class:`~dmsg.errors.DropReason`.

Source: the seed document, sections on frames and servers. Where the reference of 2019 differs, a comment says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import Random
from typing import ClassVar

from dmsg.base.buffers import FIRST_BURST, count_equal
from dmsg.base.fair_rate import CrowdedRates
from dmsg.errors import CloseReason, DropReason, RemoteProtocolError
from dmsg.keys import PUBKEY_SIZE
from dmsg.telemetry.receipts import RECEIPT_SIZE
from dmsg.telemetry.transports import Observer
from dmsg.v2019.core.congestion import PEER_QUEUE_LIMIT
from dmsg.v2019.core.peers import RelayPeer, Route, data_in
from dmsg.v2019.core.policing import Kind, Limits
from dmsg.v2019.core.routes import RouteTable
from dmsg.v2019.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    HANDSHAKE_PAYLOAD_SIZE,
    HEADER_SIZE,
    INSTANCE_SIZE,
    MAX_CLOSE,
    MAX_HANDSHAKE_PAYLOAD,
    MAX_PING,
    MIN_SECURE_REQUEST,
    NOTICE,
    PING,
    PING_NAME,
    PONG,
    RECEIPT,
    REQUEST,
    SAME_KEY,
    close_reason,
    encode_close,
    encode_frame,
    pack_id_into,
    unpack_header,
)

STRANGER_AFTER = 5.0
"""Age in seconds above which the older of two connections with the same key is assumed to belong to another program. It
applies only if the PINGs of the older connection do not identify its program."""

_KINDS = {ACCEPT: Kind.ACCEPT, CLOSE: Kind.CLOSE, FWD: Kind.STRAY, ACK: Kind.STRAY}

EARLY_FRAMES = 16
"""Maximum number of FWD and ACK frames that are forwarded on a transport before it is accepted. Honest clients send
none."""


class Relay(RouteTable):
    """Core of a server, without its sockets."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        now: Callable[[], float] = lambda: 0.0,
        random: Random | None = None,
        on_congested: Callable[[RelayPeer], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """See :class:`~dmsg.v2019.core.routes.RouteTable`."""
        super().__init__(limits=limits, now=now, random=random, on_congested=on_congested, observer=observer)
        self._crowds = CrowdedRates()
        self.tick = 0
        """Counter that the observer increments. After an increment, the next frames of each route are reported to the
        observer."""
        self.steps = 0
        """Number of frames of the last read that were processed one by one."""
        self.strays = 0
        """Number of strays in the last read that are charged to the client: those above its rate that no other client
        had provoked."""
        self.refused = 0
        """Number of REQUESTs of the last read that exceeded the rate limit of their destination."""

    # --- frames ---

    # This loop processes every frame of the server. It is one function, because a call for each frame would cost more
    # than the rest of the work. Consecutive frames to one peer form a run. The ids of a run are rewritten in place, and
    # the run is sent as one slice of the buffer, without a copy for each frame.
    def receive_frames(self, peer: RelayPeer, buffer: bytearray, end: int, limit: int = sys.maxsize) -> int:  # noqa: C901, PLR0912, PLR0915
        """Process the whole frames at the start of ``buffer``, and rewrite their ids in place.

        :param end: length of the plaintext in ``buffer``.
        :param limit: maximum number of frames that are processed one by one: control frames, and frames whose route
            differs from that of the previous frame.
        :returns: number of processed bytes. The rest is an incomplete frame. If :attr:`steps` equals ``limit``, it may
            also contain whole frames, which the caller has to pass again.
        :raises RemoteProtocolError: ``peer`` must be disconnected.
        """
        steps = self.strays = self.refused = 0
        routes = peer.routes
        unpack = unpack_header
        position = 0
        start = 0
        frames = 0
        stop = end - HEADER_SIZE
        header: tuple[int, int, int] | None = None
        last_header: tuple[int, int, int] | None = None
        burst = FIRST_BURST
        last_id = -1
        route: Route | None = None
        last_route: Route | None = None
        # These variables belong to last_route: the index and position of its first frame, and the number and bytes of
        # its ACKs.
        first = mark = acks = ack_bytes = 0
        view = memoryview(buffer)
        try:
            while position <= stop:
                header = unpack(buffer, position)
                frame_type, own_id, size = header
                following = position + HEADER_SIZE + size
                if following > end:
                    break
                frames += 1
                if FWD <= frame_type <= ACK:
                    if own_id != last_id:
                        route = routes.get(own_id)
                        last_id = own_id
                        if route is not None and not route.accepted:
                            route = None  # _forward_early handles frames of transports that are not accepted.
                    if route is not None:
                        if route is not last_route:
                            if steps >= limit:
                                frames -= 1
                                break
                            steps += 1
                            if last_route is None:
                                start = position
                            else:
                                count = frames - 1 - first
                                last_route.frames += count
                                last_route.wire += position - mark
                                if acks:
                                    last_route.acks += acks
                                    last_route.ack_wire += ack_bytes
                                if last_route.tick != self.tick:
                                    self._observe(last_route, count, acks)
                                if last_route.peer is not route.peer or route.peer.congested:
                                    self._forward(peer, last_route, view[start:position])
                                    start = position
                            first = frames - 1
                            mark = position
                            acks = ack_bytes = 0
                            last_route = route
                            to_id = route.to_id
                        elif header == last_header:
                            # Bulk data and their ACKs arrive as many frames with equal headers, and so of equal size.
                            # Strided slices rewrite the ids of all these frames at once, far faster than a loop.
                            step = following - position
                            most = (end - position) // step
                            if most >= FIRST_BURST:
                                most = min(most, burst)
                                count = count_equal(buffer, position, step, most, HEADER_SIZE)
                                burst = burst * 2 if count == most else FIRST_BURST
                                following = position + count * step
                                buffer[position + 1 : following : step] = bytes((to_id >> 8,)) * count
                                buffer[position + 2 : following : step] = bytes((to_id & 0xFF,)) * count
                                frames += count - 1
                                if frame_type == ACK:
                                    acks += count
                                    ack_bytes += following - position
                                position = following
                                continue
                        if frame_type == ACK:
                            acks += 1
                            ack_bytes += size + HEADER_SIZE
                        last_header = header
                        pack_id_into(buffer, position + 1, to_id)
                        position = following
                        continue
                # A frame of any other kind is processed here. The frames before it are forwarded first, so that the
                # order is kept.
                if steps >= limit:
                    frames -= 1
                    break
                steps += 1
                if last_route is not None:
                    self._count(last_route, frames - 1 - first, position - mark, acks, ack_bytes)
                    self._forward(peer, last_route, view[start:position])
                    last_route = None
                last_id = -1
                payload = bytes(view[position + HEADER_SIZE : following])
                position = following
                self._receive_control(peer, frame_type, own_id, payload)
        finally:
            peer.frames_in += frames
            peer.bytes_in += position
            self.steps = steps
        if last_route is not None:
            self._count(last_route, frames - first, position - mark, acks, ack_bytes)
            self._forward(peer, last_route, view[start:position])
        return position

    def _count(self, route: Route, frames: int, wire: int, acks: int, ack_bytes: int) -> None:
        route.frames += frames
        route.wire += wire
        route.acks += acks
        route.ack_wire += ack_bytes
        if route.tick != self.tick:
            self._observe(route, frames, acks)

    def _observe(self, route: Route, frames: int, acks: int) -> None:
        if self.observer is not None and route.carried is not None:
            self.observer.progress(route.carried, route, frames - acks, acks)
        else:
            route.tick = self.tick

    def _forward(self, source: RelayPeer, route: Route, run: memoryview) -> None:
        """Forward ``run``, whose frames all belong to transports between ``source`` and the peer of ``route``."""
        destination = route.peer
        if not destination.congested:
            destination.port.send(run)
            return
        own_id = route.back.to_id
        if source.routes.get(own_id) is not route:
            return  # An earlier frame of this read has closed the transport, so the frames are dropped.
        if not self.congestion.reserve(route, len(run)):
            self._overflow(source, own_id, route, run)
            return
        destination.port.send(run)
        self.congestion.pause_if_alone(source, destination)

    def _overflow(self, source: RelayPeer, own_id: int, route: Route, run: memoryview) -> None:
        """Drop frames that exceed a limit of the congested peer's queue, and close their transport."""
        self.drops[DropReason.QUEUE_FULL] += 1
        if route.carried is not None:
            route.dropped += data_in(run, route.carried.secure)
        self._close_both(source, own_id, route, CloseReason.QUEUE_FULL)

    def _receive_control(self, peer: RelayPeer, frame_type: int, own_id: int, payload: bytes) -> None:
        if (on_peer := self._ON_PEER.get(frame_type)) is not None:
            on_peer(self, peer, own_id, payload)
        elif (on_route := self._ON_ROUTE.get(frame_type)) is None:
            raise _unknown_frame_error(frame_type)
        elif (route := peer.routes.get(own_id)) is None:
            self._stray(peer, frame_type, own_id)
        else:
            on_route(self, peer, own_id, route, payload)

    def _on_ping(self, peer: RelayPeer, own_id: int, payload: bytes) -> None:
        if own_id or len(payload) > MAX_PING:
            raise _unknown_frame_error(PING)
        peer.speaks_drain = True
        if len(payload) >= PING_NAME + INSTANCE_SIZE:
            peer.instance = payload[PING_NAME : PING_NAME + INSTANCE_SIZE]
            self._notify_of_same_key(peer)
        if self._allows(peer, Kind.PING):
            self._answer(peer, encode_frame(PONG, 0, payload))

    def _on_receipt(self, peer: RelayPeer, own_id: int, payload: bytes) -> None:
        if own_id or len(payload) != RECEIPT_SIZE:
            raise _unknown_frame_error(RECEIPT)
        allowed = self._allows(peer, Kind.RECEIPT)
        if allowed and self.observer is not None and not self.observer.receipt(peer, payload):
            self.drops[DropReason.BAD_RECEIPT] += 1

    def _on_close(self, peer: RelayPeer, own_id: int, route: Route, payload: bytes) -> None:
        # A CLOSE is not charged, because a transport ends only once and its REQUEST was charged.
        self._drop_route(peer, own_id, route, close_reason(payload))
        said = payload if len(payload) <= MAX_CLOSE else payload[:1]
        self._answer(route.peer, encode_frame(CLOSE, route.to_id, said))

    def _on_accept(self, peer: RelayPeer, own_id: int, route: Route, payload: bytes) -> None:
        if len(payload) > MAX_HANDSHAKE_PAYLOAD:
            self.drops[DropReason.BAD_FRAME] += 1
            self._close_both(peer, own_id, route, CloseReason.BAD_FRAME)
        # The responder's first ACCEPT is not charged, because it answers a REQUEST.
        elif own_id & 1 and not route.accepted:
            route.accepted = route.back.accepted = True
            if (carried := route.carried) is not None and carried.back is route:
                assert self.observer is not None
                self.observer.accepted(carried, payload)
            # Like the reference, the relay does not check the payload. The clients check it.
            self._answer(route.peer, encode_frame(ACCEPT, route.to_id, payload))
        elif self._allows(peer, Kind.ACCEPT):
            # The reference also forwards a repeated ACCEPT, and an ACCEPT of the initiator. This relay forwards them
            # only to a peer that is not congested.
            if route.peer.congested:
                self.drops[DropReason.BAD_FRAME] += 1
            else:
                route.peer.port.send(encode_frame(ACCEPT, route.to_id, payload))
        else:
            self._close_both(peer, own_id, route, CloseReason.RATE_LIMITED)

    def _early_fwd(self, peer: RelayPeer, own_id: int, route: Route, payload: bytes) -> None:
        self._forward_early(peer, own_id, route, encode_frame(FWD, route.to_id, payload))

    def _early_ack(self, peer: RelayPeer, own_id: int, route: Route, payload: bytes) -> None:
        self._forward_early(peer, own_id, route, encode_frame(ACK, route.to_id, payload))

    def _forward_early(self, peer: RelayPeer, own_id: int, route: Route, frame: bytes) -> None:
        """Forward a FWD or ACK of a transport that is not accepted yet, as the reference does, but only
        ``EARLY_FRAMES`` of them.

        Each such frame may provoke an answer of a receiver that has not accepted the transport. It is not forwarded to
        a congested receiver.
        """
        if route.peer.congested:
            self._overflow(peer, own_id, route, memoryview(frame))
        elif route.frames >= EARLY_FRAMES:
            self.drops[DropReason.BAD_FRAME] += 1
            self._close_both(peer, own_id, route, CloseReason.BAD_FRAME)
        else:
            is_ack = frame[0] == ACK
            self._count(route, 1, len(frame), is_ack, len(frame) if is_ack else 0)
            route.peer.port.send(frame)

    def _stray(self, peer: RelayPeer, frame_type: int, own_id: int) -> None:
        """Handle a frame without a transport. Within the sender's rate, answer it. Above the rate, charge the sender,
        unless other clients have provoked the frame."""
        kind, now, limits = _KINDS[frame_type], self._now(), self.limits
        if not limits.request_rate or peer.police.within(kind, limits.rate(kind), now):
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
            self._answer(peer, encode_close(own_id, CloseReason.NO_SUCH_TRANSPORT))
        elif peer.provoked.take(now):
            # No answer is needed, because the peer already knows that the transport is closed.
            self.drops[DropReason.NO_SUCH_TRANSPORT] += 1
        else:
            self.strays += 1
            self.drops[DropReason.RATE_LIMITED] += 1
            if kind is not Kind.STRAY:
                peer.police.refuse(kind, limits.flood, now)

    def _notify_of_same_key(self, peer: RelayPeer) -> None:
        """Send a client one NOTICE if another program uses its key, because REQUESTs reach only one of the two
        programs.

        An older, lost connection of the same program does not count. Such a connection is recognised by its instance.
        """
        same = self.connections.of_key(peer.key)
        if len(same) == 1 or peer.noticed_same_key:
            return
        for other in same:
            strange = other.instance != peer.instance if other.instance else self._now() - other.since > STRANGER_AFTER
            if other is not peer and not other.closing and strange:
                peer.noticed_same_key = True
                self._answer(peer, encode_frame(NOTICE, 0, bytes((SAME_KEY,)) + other.port.address.encode()[:64]))
                return

    def _on_request(self, peer: RelayPeer, own_id: int, payload: bytes) -> None:
        allowed = self._allows(peer, Kind.REQUEST)
        if (used := peer.routes.get(own_id)) is not None:
            # The id of the REQUEST is in use. The reference overwrites the route, and leaves the other route of the old
            # transport in its table. This relay closes the old transport at both ends.
            self.drops[DropReason.ID_IN_USE] += 1
            self._close_both(peer, own_id, used, CloseReason.ID_IN_USE)
            return
        size = len(payload)
        responder = self.newest.get(payload[PUBKEY_SIZE:HANDSHAKE_PAYLOAD_SIZE])
        # In a REQUEST, only the KK message of a secure transport may follow the two keys.
        length_fits = size == HANDSHAKE_PAYLOAD_SIZE or MIN_SECURE_REQUEST <= size <= MAX_HANDSHAKE_PAYLOAD
        if own_id & 1 or not length_fits or payload[:PUBKEY_SIZE] != peer.key:
            self._refuse(peer, own_id, b"", DropReason.BAD_REQUEST, CloseReason.BAD_REQUEST)
        elif self.draining:
            self._refuse(peer, own_id, payload, DropReason.DRAINING, CloseReason.SHUTTING_DOWN)
        elif not allowed:
            if self.observer is not None:
                self.observer.refused(peer, _target(payload), DropReason.RATE_LIMITED.value)
            self._answer(peer, encode_close(own_id, CloseReason.RATE_LIMITED))
        elif responder is None:
            self._refuse(peer, own_id, payload, DropReason.NO_SUCH_PEER, CloseReason.NO_SUCH_PEER)
        elif not self._may_ask(peer, responder):
            self.refused += 1
            self._refuse(peer, own_id, payload, DropReason.DESTINATION_RATE, CloseReason.RATE_LIMITED)
            peer.police.refuse(Kind.REQUEST, self.limits.flood, self._now())
        elif responder.congested and responder.port.queued() > PEER_QUEUE_LIMIT:
            # The requester is refused. Otherwise the REQUESTs of others could end the connection of a client that reads
            # slowly.
            self._refuse(peer, own_id, payload, DropReason.QUEUE_FULL, CloseReason.QUEUE_FULL)
        elif len(peer.routes) >= self.limits.max_transports or len(responder.routes) >= self.limits.max_transports:
            self._refuse(peer, own_id, payload, DropReason.TOO_MANY_TRANSPORTS, CloseReason.TOO_MANY_TRANSPORTS)
        elif peer.destinations.get(responder, 0) >= self.limits.max_per_pair:
            self._refuse(peer, own_id, payload, DropReason.TOO_MANY_PER_PAIR, CloseReason.TOO_MANY_TRANSPORTS)
        else:
            to_id = self._new_id(responder)
            there, back = Route(responder, to_id), Route(peer, own_id)
            there.back, back.back = back, there
            if self.observer is not None:
                there.carried = back.carried = self.observer.requested(
                    peer, there, back, payload, _target(payload), size > HANDSHAKE_PAYLOAD_SIZE
                )
            peer.routes[own_id] = there
            responder.routes[to_id] = back
            peer.destinations[responder] = peer.destinations.get(responder, 0) + 1
            responder.destinations[peer] = responder.destinations.get(peer, 0) + 1
            self.route_count += 2
            self.transports_opened += 1
            self.congestion.route_added(peer, responder)
            self.congestion.route_added(responder, peer)
            self._answer(responder, encode_frame(REQUEST, to_id, payload))

    def _may_ask(self, peer: RelayPeer, responder: RelayPeer) -> bool:
        """Count a REQUEST, and return whether it is within the rate limit of its destination, which all requesters
        share."""
        rate, burst = self.limits.destination_rate, self.limits.destination_burst
        if not rate:
            return True
        return self._crowds.take(responder.requests, (*peer.port.blocks, peer.key), rate, burst, self._now())

    def _refuse(self, peer: RelayPeer, own_id: int, payload: bytes, reason: DropReason, byte: CloseReason) -> None:
        self.drops[reason] += 1
        if self.observer is not None:
            self.observer.refused(peer, _target(payload), reason.value)
        self._answer(peer, encode_close(own_id, byte))

    def _allows(self, peer: RelayPeer, kind: Kind) -> bool:
        """Count a frame of ``kind``, and return whether it is within the client's rate. If it is not, count a drop."""
        if peer.police.allows(kind, self.limits, self._now()):
            return True
        self.drops[DropReason.RATE_LIMITED] += 1
        return False

    _ON_PEER: ClassVar[dict[int, Callable[[Relay, RelayPeer, int, bytes], None]]] = {
        REQUEST: _on_request,
        PING: _on_ping,
        RECEIPT: _on_receipt,
    }
    """Handlers of the frames that belong to a connection. A type that is neither in this table nor in ``_ON_ROUTE``
    ends the connection."""
    _ON_ROUTE: ClassVar[dict[int, Callable[[Relay, RelayPeer, int, Route, bytes], None]]] = {
        ACCEPT: _on_accept,
        CLOSE: _on_close,
        FWD: _early_fwd,
        ACK: _early_ack,
    }
    """Handlers of frames that belong to a transport."""


def _unknown_frame_error(frame_type: int) -> RemoteProtocolError:
    return RemoteProtocolError(DropReason.UNKNOWN_FRAME, f"frame of unknown type {frame_type:#x}")


def _target(request: bytes) -> bytes:
    """Return the key of the client to which a REQUEST is addressed."""
    return request[PUBKEY_SIZE:HANDSHAKE_PAYLOAD_SIZE]
