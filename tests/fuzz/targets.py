"""Targets of fuzzing: each accepts any bytes and raises nothing, because input of a stranger may only cause errors
that have a name.

``tests.fuzz`` has Atheris look for bytes that reach new lines; ``tests.fuzz.test_corpus`` runs the same functions on
the inputs found so far, and on those that once showed a fault, in every run of the tests.

``tests.fuzz`` has atheris look for bytes that reach something new; ``tests.fuzz.test_corpus`` gives what was found,
and what was once a fault, to the same functions in every run of the tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from dmsg.apps.socks import SocksError, SocksRequest
from dmsg.base.printable import printable
from dmsg.discovery.entries.dialects import DIALECTS, decode, find_signed_form
from dmsg.discovery.entries.rules import decode_deletion
from dmsg.errors import DmsgError, HandshakeError, KeyFormatError, LocalProtocolError, RemoteProtocolError
from dmsg.keys import PubKey, SecKey, Signature
from dmsg.messaging.core.events import Requested as ChannelRequested
from dmsg.messaging.core.handshake import JSONHandshake
from dmsg.messaging.core.relay import Relay as MessagingRelay
from dmsg.messaging.core.table import ClientConnection as MessagingClient
from dmsg.messaging.core.wire import Profile
from dmsg.net.addresses import block_of, forwarded_client, parse_address, parse_ip
from dmsg.net.mdns.interfaces import Interface
from dmsg.net.websocket import frames
from dmsg.net.websocket.upgrade import plain_upgrade
from dmsg.noise.records import MAX_RECORD, RecordOpener, RecordSealer
from dmsg.rmb.envelope import wire
from dmsg.rmb.errors import EnvelopeError, TokenError
from dmsg.rmb.twins import token
from dmsg.rmb.twins.twin import Twin
from dmsg.streams.core.agreement import Hello
from dmsg.telemetry.receipts import ReceiptError, parse_receipt
from dmsg.v2019.core.events import Requested
from dmsg.v2019.core.relay import Relay
from dmsg.v2019.core.table import ClientConnection
from dmsg.v2019.core.transports import TableSettings
from dmsg.v2019.core.wire import OK, Frame, FrameBuffer, parse_drain
from dmsg.v2019.direct.tickets import Tickets
from dmsg.v2019.lan.answers import CodeAnswers
from dmsg.v2019.lan.messages import Announcement, BadMessage
from dmsg.v2019.lan.questions import CodeQuestion
from tests.support import Draws
from tests.v2019.core.test_relay import FakePort

KEYS = [SecKey.from_seed(b"fuzz %d" % number) for number in range(3)]
PUBLIC = [key.public for key in KEYS]
LAN = Interface("lan", 1, IPv4Address("10.0.0.1"), IPv4Network("10.0.0.0/8"))


def pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield pairs of a small number and some bytes. Two bytes before each piece give the number and the size, so that
    the fuzzer decides how reads are cut.
    """
    while data:
        which, size, data = data[0], 1 + (data[1] if len(data) > 1 else 0), data[2:]
        yield which, data[:size]
        data = data[size:]


def _three(table: Any, port: type[FakePort], data: bytes) -> list[FakePort]:
    """Feed the pieces to three clients of a server and check the sums in the server's table after each piece; return
    the clients' ports.
    """
    ports = [port() for _ in PUBLIC]
    peers: list[Any] = [table.add(key, one) for key, one in zip(PUBLIC, ports, strict=True)]
    left = [b"", b"", b""]
    for which, piece in pieces(data):
        which %= 3
        buffer = bytearray(left[which] + piece)
        if peers[which] is None:
            continue
        try:
            taken = table.receive_frames(peers[which], buffer, len(buffer), 16)
        except RemoteProtocolError:
            table.remove(peers[which])
            peers[which] = None
            continue
        left[which] = bytes(buffer[taken:])
        table.check()
    return ports


def _events(core: Any, data: bytes) -> Iterator[tuple[int, list[Any]]]:
    """Yield the events of a client's core after each read from a server that sends any bytes, until the core reports
    an error.
    """
    left = b""
    for which, piece in pieces(data):
        buffer = bytearray(left + piece)
        taken, events = core.receive_frames(buffer, len(buffer), 16)
        left = bytes(buffer[taken:])
        yield which, events
        core.data_to_send()
        if core.broken is not None:
            return


def relay(data: bytes) -> None:
    """Three clients of a server send any bytes."""
    for port in _three(Relay(random=Draws(0x1000)), FakePort, data):  # type: ignore[arg-type]
        FrameBuffer().feed(port.data)


def client(data: bytes) -> None:
    """A server sends any bytes to its client."""
    core = ClientConnection(PUBLIC[0], TableSettings(key=KEYS[0]))
    core.accepting = True
    first = bytearray(Frame(OK, 0, b"").encode())
    core.receive_frames(first, len(first))
    core.request(PUBLIC[1])
    for which, events in _events(core, data):
        for event in events:
            if isinstance(event, Requested):
                with suppress(LocalProtocolError):
                    if event.transport.offer is None:
                        core.accept(event.transport)
                    else:
                        core.accept_secure(event.transport, Hello())
        if which & 0x80:
            for transport in list(core.transports.values())[:1]:
                core.close(transport)


def messaging_relay(data: bytes) -> None:
    """Three clients of a messaging server send any bytes."""
    for profile in Profile:
        _three(MessagingRelay(profile), _Port, data)


class _Port(FakePort):
    """Port that also has the methods of the Messaging System."""

    address = "192.0.2.1"


def messaging_client(data: bytes) -> None:
    """A messaging server sends any bytes to its client."""
    for two_ids in (False, True):
        core = MessagingClient(KEYS[0], Profile.SKYWIRE if two_ids else Profile.SEED, two_ids=two_ids)
        core.accepting = True
        core.open(PUBLIC[1])
        for which, events in _events(core, data):
            for event in events:
                if isinstance(event, ChannelRequested):
                    with suppress(LocalProtocolError):
                        core.accept(event.channel)
            if which & 0x80:
                for channel in list(core.channels.values())[:1]:
                    core.close(channel)


def link_handshake(data: bytes) -> None:
    """Both sides read the four frames of the Messaging System's handshake."""
    for remote in (None, PUBLIC[1]):
        handshake = JSONHandshake(KEYS[0], remote, nonce=bytes(16))
        for _, piece in pieces(data):
            with suppress(DmsgError):
                handshake.receive_data(piece)
                continue
            break


def records(data: bytes) -> None:
    """A record opener reads any bytes, with a good record before them and without."""
    opener = RecordOpener(bytes(32))
    buffer = bytearray(len(data) + 2 * MAX_RECORD)
    at = opener.open_into(bytes(RecordSealer(bytes(32)).seal(b"good")), buffer, 0)
    assert bytes(buffer[:at]) == b"good"
    for _, piece in pieces(data):
        at = opener.open_into(piece, buffer, at)
        assert opener.held <= MAX_RECORD


def hello(data: bytes) -> None:
    """The parser reads the plaintext of a REQUEST; encoding a valid one again gives the same bytes."""
    with suppress(HandshakeError):
        read = Hello.decode(data)
        assert Hello.decode(read.encode()) == read
    with suppress(KeyFormatError, RemoteProtocolError):
        parse_drain(data)


def entry(data: bytes) -> None:
    """The parser reads entries and deletions in both dialects; a valid one can be written and read again."""
    for dialect in DIALECTS:
        with suppress(DmsgError):
            ways = dialect.decode(data)
            ways[0].validate()
            decode(ways[0].to_json())
            find_signed_form(ways)
    with suppress(DmsgError):
        decode_deletion(data)


def envelope(data: bytes) -> None:
    """The parser reads messages of the bus and computes the data that is signed."""
    with suppress(EnvelopeError):
        read = wire.decode(data)
        wire.challenge(read)
        wire.times_error(read, 1_800_000_000)
        wire.remaining_life(read, 1_800_000_000)
        if wire.kind_of(read):
            wire.strict_challenge(read)
            wire.payload_of(read)
        assert wire.decode(read.SerializeToString()) == read


def websocket(data: bytes) -> None:
    """The parser reads websocket frames and upgrades; the result does not depend on how the bytes are cut."""
    plain_upgrade(data)
    for masked in (False, True):
        whole, cut = frames.Frames(masked, 4096), frames.Frames(masked, 4096)
        bare = b"".join(piece for _, piece in pieces(data))
        found: list[list[tuple[int, bytes]]] = [[], []]
        with suppress(frames.FrameTooLarge):
            found[0] += whole.feed(bare)
        with suppress(frames.FrameTooLarge):
            for _, piece in pieces(data):
                found[1] += cut.feed(piece)
        assert found[0] == found[1], found


def lan(data: bytes) -> None:
    """Both ends of a code on a network get packets from anybody there."""
    answers = CodeAnswers(KEYS[0], 5274, Tickets(), 0.0)
    question = CodeQuestion(KEYS[1], 5274, 0.0)
    answers.receive(data, "10.0.0.9", LAN, 40000, 0.0)
    question.receive(data, "10.0.0.9", 5353, LAN, 0.0)
    assert answers.drops.total() <= 1 and question.drops.total() == 1
    with suppress(BadMessage):
        Announcement.parse(data)


def rmb_token(data: bytes) -> None:
    """The parser reads tokens of the bus, and twins of a registry."""
    with suppress(TokenError):
        token.parse(data).check_times(1_800_000_000)
    try:
        members = json.loads(data)
    except (ValueError, RecursionError):
        return
    with suppress(DmsgError):
        Twin.from_dict(members)


def text(data: bytes) -> None:
    """Parsers read addresses, headers of proxies, SOCKS requests, text for a terminal, keys and receipts."""
    words = data.decode("utf-8", "surrogateescape")
    with suppress(DmsgError):
        parse_address(words)
    parse_ip(words)
    block_of(words)
    forwarded_client(data)
    shown = printable(words)
    assert shown.isprintable(), shown
    request = SocksRequest()
    with suppress(SocksError):
        for _, piece in pieces(data):
            request.feed(piece)
            if request.target is not None:
                break
    for kind in (PubKey, SecKey, Signature):
        with suppress(KeyFormatError):
            kind(data)
        with suppress(KeyFormatError):
            kind.from_hex(words)
    with suppress(ReceiptError):
        parse_receipt(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    one.__name__: one
    for one in (
        client,
        entry,
        envelope,
        hello,
        lan,
        link_handshake,
        messaging_client,
        messaging_relay,
        records,
        relay,
        rmb_token,
        text,
        websocket,
    )
}
