"""Telemetry of a server of any protocol family: records events about sessions, transports, refusals and load."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from dmsg.errors import CloseReason, DropReason
from dmsg.keys import PUBKEY_SIZE
from dmsg.net.links.link import Link
from dmsg.telemetry.receipts_due import ReceiptsDue, ReceiptVerdict
from dmsg.telemetry.service import Telemetry
from dmsg.telemetry.transports import CountingRelay, DirectionCounts, Peer, TransportRecord

PROGRESS_INTERVAL = 300.0
"""Seconds between two progress events of an open transport that carries data."""
PROGRESS_LIMIT = 1000
"""Maximum number of progress events per second."""

_REASONS = {int(reason): reason.name.lower() for reason in CloseReason}
_NOTHING = (0, 0, 0, 0, 0, 0)


def reason_name(reason: int) -> str:
    """Return the name of a close reason in events."""
    return _REASONS.get(reason) or f"reason_{reason}"


class RelayTelemetry:
    """Observer of a relay (:class:`~dmsg.telemetry.transports.Observer`) and of its sessions. It records events about
    them."""

    def __init__(self, telemetry: Telemetry, now: Callable[[], float], server: bytes) -> None:
        """Register with the telemetry of the entity.

        :param now: clock of the reactor, in seconds.
        :param server: the server's public key.
        """
        self._telemetry = telemetry
        self._receipts_due = ReceiptsDue(server, now())
        self._now = now
        self.relay: CountingRelay
        self._sessions = 0
        self._open: OrderedDict[TransportRecord, float] = OrderedDict()
        """Open, accepted transports with the time of their last event; the earliest first."""
        self._drops: Counter[DropReason] = Counter()
        self._frames = self._bytes = 0
        telemetry.beats.append(self._tell_drops)
        telemetry.turns.append(self._turn)

    # --- sessions ---

    def session_opened(self, link: Link, handshake: float) -> int:
        """Record a new session, and return its number for :meth:`session_closed`."""
        self._sessions += 1
        fields = {"peer": link.remote, "session": self._sessions, "handshake_ms": round(handshake * 1000)}
        self._telemetry.record("session_open", fields)
        return self._sessions

    def session_closed(self, number: int, link: Link, duration: float, peer: Peer | None) -> None:
        """Record the end of a session."""
        reason = "connection_lost" if link.ended_for is None else link.ended_for.value
        fields: dict[str, object] = {"peer": link.remote, "session": number, "reason": reason}
        fields["duration_ms"] = round(duration * 1000)
        if peer is not None:
            fields["frames"], fields["bytes"] = peer.frames_in, peer.bytes_in
        self._telemetry.record("session_close", fields)

    def handshake_failed(self, reason: DropReason, host: str | None) -> None:
        """Record a connection that ended before its client was authenticated."""
        source = self._telemetry.network(host) if host is not None else None
        fields = {"reason": reason.value, "source": source}
        self._telemetry.record_repeated("handshake_fail", (reason.value, source), fields)

    # --- called by the relay (Observer) ---

    def requested(
        self, source: Peer, forward: DirectionCounts, back: DirectionCounts, payload: bytes, target: bytes, secure: bool
    ) -> TransportRecord:
        forward.tick = back.tick = -1
        forward.seen = back.seen = -2
        return TransportRecord(forward, back, payload, source.key, target, secure, self._now())

    def accepted(self, record: TransportRecord, payload: bytes) -> None:
        if record.request is None:
            return  # A repeated ACCEPT is not recorded. Only the clients check it.
        now = self._now()
        record.accept(payload, now)
        assert record.identity is not None
        self._open[record] = now
        if record.secure:
            self._receipts_due.add_transport(record.identity, record.source, record.target)
        self._telemetry.record(
            "transport_open",
            {
                "transport": record.identity.hex(),
                "src": record.source,
                "dst": record.target,
                "secure": record.secure,
                **_accept_time_fields(now - record.opened),
            },
        )

    def refused(self, source: Peer, target: bytes, reason: str) -> None:
        fields = {"src": source.key, "reason": reason}
        if len(target) == PUBKEY_SIZE:
            fields["dst"] = target
        self._telemetry.record_repeated("transport_refuse", (source.key, reason), fields, target)

    def ended(self, record: TransportRecord, reason: int, by: str) -> None:
        now = self._now()
        self._open.pop(record, None)
        counts = record.counts()
        fields = {
            "src": record.source,
            "dst": record.target,
            "secure": record.secure,
            "reason": reason_name(reason),
            "by": by,
            "duration_ms": round((now - record.opened) * 1000),
            **_since(record, counts),
            "total_ab": counts[0],
            "total_ba": counts[1],
        }
        for name, way in (("dropped_ab", record.forward), ("dropped_ba", record.back)):
            if way.dropped:
                fields[name] = way.dropped
        if record.identity is not None:
            self._receipts_due.ended(record.identity, now)
        if record.identity is not None and record.accepted is not None:
            fields["transport"] = record.identity.hex()
            fields |= _accept_time_fields(record.accepted - record.opened)
        self._telemetry.record("transport_close", fields)

    def progress(self, record: TransportRecord, route: DirectionCounts, data: int, acks: int) -> None:
        now = None
        back = route.back
        if acks and back.asked_at is not None:
            now = self._now()
            record.sample(now - back.asked_at)
            back.asked_at = None
        tick = self.relay.tick
        if data and route.asked_at is None and tick - route.seen >= 2 and record.accepted is not None:
            route.asked_at = self._now() if now is None else now
            back.tick = -1
        route.seen = tick
        # Normally, the relay reports the frames of a direction only once in a tick, which is a second. While data of
        # the opposite direction awaits its ACK, the relay must report every frame of this direction, because the frame
        # may be that ACK. A ``route.tick`` of -1 makes the relay report every frame, because no tick has this number.
        route.tick = tick if back.asked_at is None else -1

    def receipt(self, source: Peer, payload: bytes) -> bool:
        due = self._receipts_due.check(
            payload, bytes(source.key), self._now(), self._telemetry.network(source.port.address) or ""
        )
        if due is ReceiptVerdict.NOT:
            return False
        fields = {"receipt": payload.hex(), "peer": source.key}
        self._telemetry.record_receipt("receipt", fields | ({"former": True} if due is ReceiptVerdict.FORMER else {}))
        return True

    # --- called periodically ---

    def _turn(self) -> None:
        """Run once a second: record progress of transports that had no event for :data:`PROGRESS_INTERVAL` seconds."""
        self.relay.tick += 1
        now = self._now()
        for _ in range(PROGRESS_LIMIT):
            carried, told_at = next(iter(self._open.items()), (None, 0.0))
            if carried is None or now - told_at < PROGRESS_INTERVAL:
                break
            self._open.move_to_end(carried)
            self._open[carried] = now
            counts = carried.counts()
            if counts != carried.reported:
                assert carried.identity is not None
                fields = {
                    "transport": carried.identity.hex(),
                    "src": carried.source,
                    "dst": carried.target,
                    "secure": carried.secure,
                    **_since(carried, counts),
                }
                self._telemetry.record("transport_progress", fields)

    def _tell_drops(self) -> None:
        drops = Counter(self.relay.drops)
        for reason, count in (drops - self._drops).items():
            self._telemetry.record("drop", {"reason": reason.value, "n": count})
        self._drops = drops

    def load(self) -> dict[str, object]:
        """Return the fields of a heartbeat that describe the relay."""
        frames, size = self.relay.frames, self.relay.frame_bytes
        fields: dict[str, object] = {
            "transports": self.relay.route_count // 2,
            "frames": frames - self._frames,
            "bytes": size - self._bytes,
        }
        self._frames, self._bytes = frames, size
        return fields


def _accept_time_fields(seconds: float) -> dict[str, int]:
    """Return the fields for the time from REQUEST to ACCEPT."""
    return {"accept_ms": round(seconds * 1000), "accept_us": round(seconds * 1_000_000)}


def _since(record: TransportRecord, counts: tuple[int, int, int, int, int, int]) -> dict[str, object]:
    """Return the fields with the counts since a transport's last event, and record that these counts were reported."""
    before, record.reported = record.reported, counts
    fields: dict[str, object] = {}
    if record.accepted is not None or counts != _NOTHING:
        names = ("data_ab", "data_ba", "frames_ab", "frames_ba", "acks_ab", "acks_ba")
        fields = {name: now - then for name, now, then in zip(names, counts, before, strict=True)}
    if record.rtt is not None:
        fields["rtt"], record.rtt = record.rtt, None
    return fields
