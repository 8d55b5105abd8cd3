"""Hand-made mutants of streams and of the message bus: the module of each, and the old and new text of its changes."""

from __future__ import annotations

from collections.abc import Sequence

Change = tuple[str, str]
"""Old text and new text. The old text occurs once in its module."""
_SECURE = "dmsg.streams.core.secure"
_RESUMPTION = "dmsg.streams.core.resumption"
_STREAM = "dmsg.net.streams.stream"
_STREAMS = "dmsg.streams.streams"

_LATER_NONCES = (
    "            raise SecureError(self._diagnose(bytes(payload), associated)) from None\n"
    "        self._open_nonce = nonce + 1",
    "            for nonce in range(nonce + 1, nonce + 4):\n"
    "                try:\n"
    "                    plain = self._decrypt(pack_nonce(nonce), payload, associated)\n"
    "                    break\n"
    "                except InvalidTag:\n"
    "                    continue\n"
    "            else:\n"
    "                raise SecureError(self._diagnose(bytes(payload), associated)) from None\n"
    "        self._open_nonce = nonce + 1",
)
_ANY_SEQUENCE = ("or plain[0] << 8 | plain[1] != sequence:", "or False:")
_SENT_AGAIN = "zip((data for data, _ in frames), tickets, strict=True)"
_SUSPEND = " " * 20 + "self.suspend(stream, CloseReason.STALLED)"

OF_STREAMS: dict[str, tuple[str, Sequence[Change]]] = {
    "the nonce of an ACK is not counted": (
        _SECURE,
        [
            (
                "        self._open_nonce = nonce + 1\n        if nonce + 1 ==",
                "        self._open_nonce = nonce + (associated != _ACK_DATA)\n        if nonce + 1 ==",
            )
        ],
    ),
    "later nonces are tried": (_SECURE, [_LATER_NONCES]),
    "the sequence of a FWD is not checked": (_SECURE, [_ANY_SEQUENCE]),
    "a server can cut frames out": (_SECURE, [_LATER_NONCES, _ANY_SEQUENCE]),
    "the hash of an ACK is not checked": (
        _SECURE,
        [("if self._digest(sent_hash, self.acknowledged)[:ACK_HASH_SIZE] != digest:", "if False:")],
    ),
    "the hash of a RESUME is not checked": (
        _RESUMPTION,
        [("or self._digest(rolling, position) != remote.hash:", "or False:")],
    ),
    "RESUME acknowledges one frame too many": (
        _RESUMPTION,
        [("if position >= remote.received:", "if position > remote.received:")],
    ),
    "large frames are hashed by their data": (
        _SECURE,
        [
            (
                "payload[-TAG_SIZE:] if self._tags else data)\n            if before",
                "payload[-TAG_SIZE:] if self._tags and size < 60000 else data)\n            if before",
            )
        ],
    ),
    "frames in flight are kept at RESUME": (
        _RESUMPTION,
        [("        if in_flight:\n            in_flight.clear()\n", "")],
    ),
    "bytes in flight are kept at RESUME": (
        _RESUMPTION,
        [("        self.in_flight_bytes = 0\n        self._before", "        self._before")],
    ),
    "the announced window is kept at RESUME": (
        _RESUMPTION,
        [("        self.told_window = told_window\n\n    def detach", "\n    def detach")],
    ),
    "frames without data are kept at RESUME": (
        _RESUMPTION,
        [("while in_flight and not in_flight[0][0]:", "while False:")],
    ),
    "data are sent again in the wrong order": (_STREAM, [(_SENT_AGAIN, f"list({_SENT_AGAIN})[::-1]")]),
    "a stream that moved sends nothing": (
        _STREAM,
        [
            (
                "callLater(LINGER, self._lingered)\n        self._schedule()\n\n    def window_opened",
                "callLater(LINGER, self._lingered)\n\n    def window_opened",
            )
        ],
    ),
    "unread pieces are joined in the wrong order": (
        _STREAM,
        [("self._unread[-1] += data", "self._unread[-1] = data + self._unread[-1]")],
    ),
    "data overtake what is unread": (
        _STREAM,
        [("if self._paused or self._unread or self._delivering:", "if self._paused or self._delivering:")],
    ),
    "stalls are never noticed": (_STREAMS, [("elif now - before[1] >= STALL_TIME:", "elif False:")]),
    "a generation may be used again": (
        _STREAMS,
        [("resume.generation > stream.secure_end.generation", "resume.generation >= stream.secure_end.generation")],
    ),
    "RESUME of any key is taken": (
        _STREAMS,
        [
            (
                "known = isinstance(peer, DmsgAddress) and peer.public_key == remote",
                "known = isinstance(peer, DmsgAddress)",
            )
        ],
    ),
    "a CLOSE of a server ends the stream": (
        _STREAMS,
        [("if not resumable or (final and reason in FINAL):", "if not resumable or reason in FINAL:")],
    ),
    "a stall is noticed without consequence": (_STREAMS, [(_SUSPEND, " " * 20 + "pass")]),
}
"""Mutants of secure streams, by name. Walks with lies find them."""
_UPLINK = "dmsg.rmb.session.uplink"
_SEAL = "dmsg.rmb.session.seal"
_DELIVERY = "dmsg.rmb.relay.delivery"
_FORWARD = "dmsg.rmb.relay.federation.forward"
_ACCEPT = "dmsg.rmb.relay.inbound.accept"
_SQLITE = "dmsg.rmb.relay.queue.sqlite"
_STORE = """        keeping = self._queue.append(FEDERATION, mail.data, mail.until, mail.sender)
        keeping.addCallback(kept)"""

OF_THE_BUS: dict[str, tuple[str, Sequence[Change]]] = {
    "a lost connection loses its unconfirmed messages": (
        _UPLINK,
        [("self._uplink.link_down(self, left)", "self._uplink.link_down(self, deque())")],
    ),
    "any pong confirms all messages": (
        _UPLINK,
        [('number = min(int.from_bytes(payload, "big"), self._sent)', "number = self._sent")],
    ),
    "a client answers pings before it has processed the messages": (
        _UPLINK,
        [("        self._ledger.ping(payload)", "        self._socket.pong(payload)")],
    ),
    "repeated messages are not recognised": (_SEAL, [("if (uid, kind) in known:", "if False:")]),
    "messages are remembered for a fraction of their lifetime": (
        _SEAL,
        [("while heap and heap[0][0] <= now:", "while heap and heap[0][0] <= now + 1490:")],
    ),
    "a confirmation counts for one message more": (
        _DELIVERY,
        [("        while self._confirmed < number:", "        while self._window and self._confirmed < number + 1:")],
    ),
    "a session that ends loses its unconfirmed messages": (
        _DELIVERY,
        [
            (
                "            for message in self._window\n            if message.queue_id",
                "            for message in ()\n            if message.queue_id",
            )
        ],
    ),
    "a session that ends loses its backlog": (_DELIVERY, [("        left += self._backlog\n", "")]),
    "stored messages are not read again when a session connects": (
        _DELIVERY,
        [("        self._read()\n\n    @property\n    def is_trusted", "\n    @property\n    def is_trusted")],
    ),
    "every answer of another relay counts as acceptance": (
        _FORWARD,
        [("if outcome is not AttemptOutcome.FAILED:", "if True:")],
    ),
    "messages for other relays are settled and not stored": (
        _FORWARD,
        [(_STORE, "        mail.settle()\n        return\n" + _STORE)],
    ),
    "messages for other relays are not tried again": (
        _FORWARD,
        [("            elif item.next:", "            elif False:")],
    ),
    "a message of another relay is accepted before it is delivered": (
        _ACCEPT,
        [('        ledger.ping(b"")\n', '        ledger.ping(b"")\n        mail.settle()\n')],
    ),
    "the queue commits nothing": (
        _SQLITE,
        [('self._db.execute("COMMIT")\n        except', 'self._db.execute("ROLLBACK")\n        except')],
    ),
    "messages are read from the queue in the wrong order": (
        _SQLITE,
        [("ORDER BY id LIMIT ?", "ORDER BY id DESC LIMIT ?")],
    ),
}
"""Mutants of the message bus, by name. Walks of the bus find them."""
_ACKS = "dmsg.messaging.core.acks"
_RELAY = "dmsg.messaging.core.relay"
_SESSION = "dmsg.messaging.session"
_TABLE = "dmsg.messaging.core.table"

OF_MESSAGING: dict[str, tuple[str, Sequence[Change]]] = {
    "a server does not close the channels of a lost client": (
        _RELAY,
        [("            self._close(end, notify=False)\n        self.congestion", "        self.congestion")],
    ),
    "a client does not end the channels of a lost connection": (
        _SESSION,
        [("call_isolated(stream.carrier_closed, CloseReason.PEER_DISCONNECTED)", "pass")],
    ),
    "messages that are read together are reordered": (
        _TABLE,
        [("                joined.append(data)", "                joined.insert(0, data)")],
    ),
    "read payloads are not acknowledged": (_ACKS, [("        self._due += self._read\n", "")]),
}
"""Mutants of the Messaging System, by name. Walks of that family find them."""
MUTANTS = {**OF_STREAMS, **OF_THE_BUS, **OF_MESSAGING}
INVISIBLE = {
    "frames without data are kept at RESUME": "an empty frame that is sent again is acknowledged and delivers nothing",
    "a stream that moved sends nothing": "both ends also send when they count the ACKs of a move",
    "a session that ends loses its unconfirmed messages": "no relay has confirmed them, so they are sent again",
    "a session that ends loses its backlog": "no relay has confirmed it, so it is sent again",
    "data overtake what is unread": "while data is unread, the reader is paused, or a delivery is in progress",
}
"""Mutants that change nothing that an application could see, with the reason."""
