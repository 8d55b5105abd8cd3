"""Inputs with which fuzzing begins: valid data for each target."""

from __future__ import annotations

import json

from dmsg.discovery.entries.entry import ClientMeta, Entry, ServerMeta
from dmsg.discovery.entries.rules import Deletion
from dmsg.messaging.core.agreement import Proposal
from dmsg.messaging.core.wire import Profile, encode_close, encode_closed, encode_open, send_head
from dmsg.net.mdns.packets import Question
from dmsg.net.websocket import frames
from dmsg.noise.records import RecordSealer
from dmsg.rmb.envelope.envelope_pb2 import Envelope
from dmsg.streams.core.agreement import Hello, Proposal as SecureProposal, Resume
from dmsg.telemetry.receipts import RECEIPT_SIZE
from dmsg.v2019.core.wire import ACCEPT, ACK, CLOSE, FWD, PING, REQUEST, Frame
from dmsg.v2019.lan.messages import Announcement, name_for
from tests.fuzz.targets import KEYS, PUBLIC


def cut(*reads: tuple[int, bytes]) -> bytes:
    """Encode reads with their number as :func:`tests.fuzz.targets.pieces` decodes them."""
    found = b""
    for which, data in reads:
        for start in range(0, len(data), 256):
            part = data[start : start + 256]
            found += bytes((which, len(part) - 1)) + part
    return found


def _frames() -> list[bytes]:
    keys = bytes(PUBLIC[0] + PUBLIC[1])
    # The relay's first draw of an id is known: see Draws in targets.
    there = 2 * 0x1000 + 1
    request, accept = Frame(REQUEST, 2, keys).encode(), Frame(ACCEPT, there, keys).encode()
    secure = SecureProposal(KEYS[1], PUBLIC[0], Hello(7, 1000, bytes(16)), ephemeral=KEYS[2]).payload
    data = Frame(FWD, 2, b"\0\1data").encode()
    return [
        cut((0, request), (1, accept), (0, data + data), (1, Frame(ACK, there, b"\0\1").encode())),
        cut((0, request), (1, Frame(CLOSE, there, b"\3").encode()), (0, Frame(PING, 0, bytes(16)).encode())),
        cut((0, Frame(REQUEST, 1, secure).encode() + Frame(REQUEST, 3, bytes(PUBLIC[1] + PUBLIC[0])).encode())),
        cut((0, Frame(FWD, 3, b"\0\0x").encode() * 3), (0x80, Frame(CLOSE, 3, b"\0").encode())),
    ]


def _channels() -> list[bytes]:
    found = []
    for profile in Profile:
        opening = encode_open(profile, 1, PUBLIC[1], Proposal(KEYS[1], PUBLIC[0], profile, ephemeral=KEYS[2]).message)
        asked = encode_open(profile, 1, PUBLIC[1], bytes(49))
        message = send_head(profile, 1, 3) + bytes(19)
        found += [
            cut((0, opening + message), (0x80, encode_close(profile, 1))),
            cut((0, asked), (1, encode_closed(profile, 255) + message), (2, encode_close(profile, 0))),
        ]
    return found


def _entries() -> list[bytes]:
    one = Entry("0.0.1+secure1", 3, 5, PUBLIC[0].hex(), ClientMeta((PUBLIC[1].hex(),)), ServerMeta("1.2.3.4:80", 9))
    deletion = Deletion(PUBLIC[0].hex(), 3, 6).sign(KEYS[0])
    return [one.sign(KEYS[0]).to_json(), deletion.to_json(), b'{"static":"' + b"[" * 100]


def _envelopes() -> list[bytes]:
    one = Envelope(uid="u", timestamp=1_800_000_000, expiration=60)
    one.source.twin, one.destination.twin, one.destination.connection = 1, 2, "c"
    one.request.command, one.plain = "cmd", b"payload"
    other = Envelope(uid="u", timestamp=1, expiration=2)
    other.error.code, other.error.message = 300, "no"
    return [one.SerializeToString(), other.SerializeToString()]


def _packets() -> list[bytes]:
    question = Question(1, name_for(PUBLIC[1], 5274))
    announced = Announcement(PUBLIC[0], 40000).encode()
    return [question.encode(), question.encode_answer(announced), announced]


def seeds() -> dict[str, list[bytes]]:
    """Return the inputs by target."""
    messages = frames.encode(frames.BINARY, b"message", b"mask") + frames.encode(frames.PING, b"p", b"mask")
    fragment = b"\x02\x83mask123\x80\x80mask"
    upgrade = (
        b"GET /?t HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    sealed = bytes(RecordSealer(bytes(32), 1).seal(b"more"))
    jwt = b"eyJhbGciOiJSUzUxMiJ9.eyJzdWIiOjEsImlhdCI6MTgwMDAwMDAwMCwiZXhwIjoxODAwMDAwMDYwfQ.ZQ"
    hellos = [Hello(7, 9, bytes(16)), Hello(0, 9, None, Resume(bytes(16), 1, 2, bytes(32))), Hello(probe=1)]
    return {
        "client": _frames(),
        "relay": _frames(),
        "messaging_client": _channels(),
        "messaging_relay": _channels(),
        "link_handshake": [cut((0, b'{"version":"0.1","initiator":"' + PUBLIC[1].hex().encode() + b'","nonce":"'))],
        "records": [cut((0, sealed[:7]), (0, sealed[7:])), cut((0, b"\0\x14\0\0\0\1" + bytes(16)))],
        "hello": [one.encode() for one in hellos] + [b"\0\7" + bytes(PUBLIC[0])],
        "entry": _entries(),
        "envelope": _envelopes(),
        "lan": _packets(),
        "websocket": [cut((0, messages)), cut((0, messages[:5]), (0, messages[5:])), cut((0, fragment)), upgrade],
        "rmb_token": [jwt, json.dumps({"id": 1, "account": "5", "relay": ["r"], "pk": None}).encode()],
        "text": [
            b"host:80",
            b"[::1]:80",
            b"1.2.3.4, 5.6.7.8",
            b"\x1b[2J",
            b"\5\1\0\5\1\0\3\1x\0P",
            bytes(RECEIPT_SIZE),
        ],
    }
