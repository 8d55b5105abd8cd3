"""Hand-made mutants of several protocol families: the module of each, and the old and new text of its changes."""

from __future__ import annotations

from collections.abc import Sequence

Change = tuple[str, str]
"""Old text and new text. The old text occurs once in its module."""
_SECURE = "dmsg.streams.core.secure"
_RESUMPTION = "dmsg.streams.core.resumption"
_STREAM = "dmsg.net.streams.stream"
_RECEIVING = "dmsg.net.streams.receiving"
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
_STALLED = (
    " " * 20
    + "end.transport.carrier.leave(CloseReason.STALLED)\n"
    + " " * 20
    + "self.suspend(stream, CloseReason.STALLED)\n"
)

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
                "FairTimeout(self._reactor, LINGER, self._lingered)\n        self._schedule()\n\n    def window_opened",
                "FairTimeout(self._reactor, LINGER, self._lingered)\n\n    def window_opened",
            )
        ],
    ),
    "unread pieces are joined in the wrong order": (
        _RECEIVING,
        [("self._unread[-1] += data", "self._unread[-1] = data + self._unread[-1]")],
    ),
    "data overtake what is unread": (
        _RECEIVING,
        [("if self._paused or self._unread or self._delivering:", "if self._paused or self._delivering:")],
    ),
    "stalls are never noticed": (_STREAMS, [("elif awake - before[1] >= STALL_TIME:", "elif False:")]),
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
        [("if not resumable or (final and reason in FINAL_REASONS):", "if not resumable or reason in FINAL_REASONS:")],
    ),
    "a stall is noticed without consequence": (_STREAMS, [(_STALLED, " " * 20 + "pass\n")]),
}
"""Mutants of secure streams, by name. Walks with lies find them."""
_PUBLISH = "dmsg.clients.publish"
_NOT_YET = "        if wanted != self._delegated():\n            "

OF_CLIENTS: dict[str, tuple[str, Sequence[Change]]] = {
    "nobody is told of an entry that is already published": (
        _PUBLISH,
        [
            (
                "            # that names the server, and is open again.\n            self._fire_if_published()\n",
                "            # that names the server, and is open again.\n",
            )
        ],
    ),
    "nobody is told of an entry after a lost connection": (
        _PUBLISH,
        [(_NOT_YET, "        if wanted != self._delegated():\n            self._waiting.clear()\n            ")],
    ),
    "a client that a server of 2019 has forgotten does not connect again": (
        "dmsg.v2019.reachability",
        [("        if reason in _NOT_DELIVERED:\n", "        if False:\n")],
    ),
}
"""Mutants of clients, by name. Walks without lies find them."""
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
        [('number = min(int.from_bytes(payload, "big"), self._sent_count)', "number = self._sent_count")],
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
        [
            (
                "        while self._confirmed_count < number:",
                "        while self._window and self._confirmed_count < number + 1:",
            )
        ],
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
    "a session that ends loses its backlog": (_DELIVERY, [("        left += self._backlog.messages\n", "")]),
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
_CHANNELS = "dmsg.messaging.core.channels"
_SESSION = "dmsg.messaging.session"
_TABLE = "dmsg.messaging.core.table"

OF_MESSAGING: dict[str, tuple[str, Sequence[Change]]] = {
    "a server does not close the channels of a lost client": (
        _CHANNELS,
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
_PAKE = "dmsg.apps.codes.pake"
_CODE_STREAM = "dmsg.apps.codes.stream"
_SENDER = "dmsg.apps.parcels.sender"
_RECEIVER = "dmsg.apps.parcels.receiver"
_CONTENTS = "dmsg.apps.parcels.contents"
_DESTINATION = "dmsg.apps.parcels.destination"
_SOURCES = "dmsg.apps.parcels.walk"

OF_CODES: dict[str, tuple[str, Sequence[Change]]] = {
    "every confirmation is right": (_PAKE, [("if not hmac.compare_digest(body, self._derive(other)):", "if False:")]),
    "an agreement does not depend on its stream": (
        _PAKE,
        [
            ('b" sender " + bytes(sender) + binding', 'b" sender "'),
            ('b" receiver " + bytes(receiver) + binding', 'b" receiver "'),
        ],
    ),
    "a sender confirms before it judges": (
        _PAKE,
        [
            (
                "            self._outgoing += _message(PAKE, bytes((VERSION,)) + self._element)\n",
                "            self._outgoing += _message(PAKE, bytes((VERSION,)) + self._element)\n"
                '            self._outgoing += _message(CONFIRM, self._derive(b"confirm sender"))\n',
            )
        ],
    ),
    "a stream may guess several times": (
        _PAKE,
        [
            (
                '                self._outgoing += _message(WRONG, b"")\n',
                '                self._outgoing += _message(WRONG, b"")\n                return\n',
            )
        ],
    ),
    "wrong guesses are not counted": (_CODE_STREAM, [("            self.tries -= 1\n", "")]),
    "a code survives five wrong guesses": (_CODE_STREAM, [("            if self.tries > 0:", "            if True:")]),
    "a right guess resets the count": (
        _CODE_STREAM,
        [("            self.tries -= 1\n", "            self.tries -= self.tries == MAX_WRONG_GUESSES\n")],
    ),
    "every failed agreement counts as a wrong guess": (
        _CODE_STREAM,
        [("            if result.check(WrongCode) is None:\n", "            if False:\n")],
    ),
    "a code for one receiver is good for two": (
        _CODE_STREAM,
        [("            self.receivers -= 1\n", "            self.receivers -= 0.5\n")],
    ),
    "early data after an agreement is lost": (
        _CODE_STREAM,
        [("        if early:\n            protocol.dataReceived(early)\n", "")],
    ),
    "silent strangers keep others out": (
        _CODE_STREAM,
        [("if (now - began >= SLOW_RUN or not end.has_spoken) and", "if now - began >= 1e6 and")],
    ),
    "a resumed file is not compared": (_SENDER, [("if not left and hashed.hexdigest() == digest:", "if not left:")]),
    "a resumed file is sent from its beginning": (_SENDER, [("            file.seek(offset)\n", "")]),
    "a longer file is sent in place of the offered one": (
        _SOURCES,
        [(" or (status.st_size > entry.size and self._is_other(index, file, status)):", ":")],
    ),
    "a lost connection after the last byte counts as success": (
        _SENDER,
        [
            (
                "        if not self.done.called and not self._given_up:\n            error =",
                "        if not self.done.called and self._said_all:\n"
                "            self.done.callback(SentParcel(self._size, self._files, 0.0))\n"
                "        if not self.done.called and not self._given_up:\n            error =",
            )
        ],
    ),
    "a receiver confirms before the files have their names": (
        _RECEIVER,
        [
            (
                "            def in_place() -> None:\n                self._say(ok=True)\n",
                "            self._say(ok=True)\n\n            def in_place() -> None:\n",
            )
        ],
    ),
    "an interrupted file gets its final name": (
        _CONTENTS,
        [
            (
                "        if file is not None:\n            file.close()\n",
                "        if file is not None:\n            file.close()\n"
                "            self._place._put_in_place(self.item)\n",
            )
        ],
    ),
    "what has arrived is not resumed": (_CONTENTS, [("            if size:\n", "            if False:\n")]),
    "old bytes stay behind a resumed file": (
        _DESTINATION,
        [("            os.ftruncate(file.fileno(), offset)\n", "")],
    ),
    "more old bytes exist than the file has": (
        _DESTINATION,
        [
            (
                "return 0 if is_directory or status.st_size > entry.size else status.st_size",
                "return 0 if is_directory else status.st_size",
            )
        ],
    ),
    "a file that is written to while it is sent is not reported": (
        _SOURCES,
        [("return (status.st_size, max(0, status.st_mtime_ns)) != (entry.size, entry.mtime)", "return False")],
    ),
    "a short write is not repeated": (
        _CONTENTS,
        [
            (
                "            view = view[self._file.write(view) :]\n",
                "            self._file.write(view)\n            break\n",
            )
        ],
    ),
    "files of an earlier transfer stay in a directory": (
        _DESTINATION,
        [("                    yield from self._take_away_others(entry, inside, known)\n", "")],
    ),
}
"""Mutants of codes and parcels, by name. Walks of codes find them."""
_RULES = "dmsg.discovery.entries.rules"
_ENTRY = "dmsg.discovery.entries.entry"
_ENTRIES = "dmsg.discovery.store.sqlite"
_TRANSACTION = "dmsg.discovery.store.transaction"
_ANY_NEXT = ("if entry.sequence != next_sequence(head.sequence):", "if False:")
_ANY_TIME = (
    "if time_order(entry.timestamp) <= head.order:\n        raise EntryInvalid(WRONG_TIME)\n    return False",
    "if False:\n        raise EntryInvalid(WRONG_TIME)\n    return False",
)

OF_DISCOVERY: dict[str, tuple[str, Sequence[Change]]] = {
    "an entry may have any sequence": (_RULES, [_ANY_NEXT]),
    "an entry may have any time": (_RULES, [_ANY_TIME]),
    "an old entry replaces a newer one": (_RULES, [_ANY_NEXT, _ANY_TIME]),
    "the time of a tombstone is not compared": (
        _RULES,
        [("if head is not None and time_order(entry.timestamp) <= head.order:", "if False:")],
    ),
    "a deleted key may have any entry": (
        _RULES,
        [
            ("        if entry.sequence != 0:\n", "        if False:\n"),
            ("if head is not None and time_order(entry.timestamp) <= head.order:", "if False:"),
        ],
    ),
    "the signature of a deletion is not verified": (
        _RULES,
        [("    deletion.verify()\n", "")],
    ),
    "a deletion leaves no tombstone": (
        _ENTRIES,
        [
            (
                "                deletion.static,\n            ),\n        )\n",
                "                deletion.static,\n            ),\n        )\n"
                '        self._db.execute("DELETE FROM entries WHERE static = ?", (deletion.static,))\n',
            )
        ],
    ),
    "a deletion deletes nothing": (
        _ENTRIES,
        [("SET time_order = ?, json = NULL, listable", "SET time_order = ?, listable")],
    ),
    "the content of a later entry is not stored": (
        _ENTRIES,
        [
            ("time_order = excluded.time_order, json = excluded.json, ", "time_order = excluded.time_order, "),
            ("time_order = ?, json = ?, posted = ?", "time_order = ?, json = coalesce(json, ?), posted = ?"),
        ],
    ),
    "the store commits nothing": (
        _TRANSACTION,
        [('        db.execute("COMMIT")\n', '        db.execute("ROLLBACK")\n')],
    ),
    "the signature of an entry is not verified": (_ENTRY, [("if signer.hex() != self.static:", "if False:")]),
    "a refused entry counts as posted": (
        "dmsg.discovery.lookup.own_entries",
        [
            (
                "        if status == 200:\n            return\n        error =",
                "        if status in (200, 422):\n            return\n        error =",
            )
        ],
    ),
}
"""Mutants of discovery, by name. Walks of discovery find them."""
_BRIDGE = "dmsg.agent.bridge"
_PROGRAMS = "dmsg.agent.programs"
_LOCAL = "dmsg.agent.local_stream"

OF_AGENTS: dict[str, tuple[str, Sequence[Change]]] = {
    "the stream of a killed program stays open": (
        _BRIDGE,
        [
            (
                "        if not self._closed and self._close_reason is None and self.transport is not None:\n"
                "            self.transport.abortConnection()",
                "        pass",
            )
        ],
    ),
    "a program that ends ends the streams of all": (
        _PROGRAMS,
        [
            (
                "            self._forget()\n            bridge.program_lost()\n",
                "            for other in list(self._agent.bridges):\n                other.program_lost()\n",
            )
        ],
    ),
    "a wrong frame ends the streams of all": (
        _PROGRAMS,
        [
            (
                "            else:\n                self._end()\n\n    def _say_last",
                "            else:\n                for bridge in list(self._agent.bridges):\n"
                "                    bridge.stop()\n\n    def _say_last",
            )
        ],
    ),
    "data counts as acknowledged when the agent has it": (
        _BRIDGE,
        [
            (
                "            sent.addCallbacks(self._acknowledged, lambda _: None, callbackArgs=(len(payload),))",
                "            sent.addErrback(lambda _: None)\n            self._acknowledged(None, len(payload))",
            )
        ],
    ),
    "acknowledgements are lost while a program does not read": (
        _BRIDGE,
        [
            (
                "        if self._congested:\n            return\n",
                "        if self._congested:\n            self._unconfirmed_count = 0\n            return\n",
            )
        ],
    ),
    "a stream that was full is not read again": (
        _BRIDGE,
        [
            (
                "                self._paused = False\n                self.transport.resumeProducing()",
                "                pass",
            )
        ],
    ),
    "a program does not report what it has read": (
        _LOCAL,
        [("            self._transport.write(encode_count(Kind.READ, size))", "            pass")],
    ),
    "a half-close closes the stream": (
        _BRIDGE,
        [("        if self._link is not None and self._program_half_closes:\n", "        if False:\n")],
    ),
    "a stream that a program closes is aborted": (
        _BRIDGE,
        [("            if reason == CloseReason.UNSPECIFIED:\n", "            if False:\n")],
    ),
    "the port of a program that has ended stays in use": (
        _PROGRAMS,
        [
            (
                "            self._listening.stopListening()\n            self.service.stop()",
                "            self.service.stop()",
            )
        ],
    ),
    "a program does not get its port again": (
        "dmsg.agent.listening",
        [("            self._registration.soon(FIRST_DELAY)\n", "")],
    ),
    "an agent does not remove the socket of a killed one": (
        "dmsg.agent.service",
        [("                path.unlink()  # A killed agent has left this file.\n", "")],
    ),
}
"""Mutants of the agent, by name. Walks of agents find them."""
FAMILIES = {
    "streams": OF_STREAMS,
    "clients": OF_CLIENTS,
    "bus": OF_THE_BUS,
    "messaging": OF_MESSAGING,
    "codes": OF_CODES,
    "discovery": OF_DISCOVERY,
    "agents": OF_AGENTS,
}
"""Mutants of each family."""
MUTANTS = {name: mutant for family in FAMILIES.values() for name, mutant in family.items()}
INVISIBLE = {
    "an entry may have any sequence": "the time is compared, too, and a later entry of the same key is no fault",
    "frames without data are kept at RESUME": "an empty frame that is sent again is acknowledged and delivers nothing",
    "a stream that moved sends nothing": "both ends also send when they count the ACKs of a move",
    "a session that ends loses its unconfirmed messages": "no relay has confirmed them, so they are sent again",
    "stored messages are not read again when a session connects": "the relay's check reads them within a second",
    "a session that ends loses its backlog": "no relay has confirmed it, so it is sent again",
    "a stream that a program closes is aborted": "a program closes after the peer has acknowledged all its data",
    "data overtake what is unread": "while data is unread, the reader is paused, or a delivery is in progress",
}
"""Mutants that change nothing that an application could see, with the reason."""
