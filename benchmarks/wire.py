"""A load generator that speaks the wire protocol on plain sockets.

Cheap on purpose: records are sealed before the clock starts, and what comes
back is counted from record lengths without being decrypted.
"""

from __future__ import annotations

import select
import selectors
import socket
import ssl
import struct
import time
from contextlib import suppress

from benchmarks.machine import CIPHER
from dmsg.base.cipher_names import Cipher
from dmsg.keys import PubKey, SecKey
from dmsg.net.carriers.names import ALPN, PLAIN, SECURE_WEBSOCKET, WEBSOCKET, Carrier
from dmsg.net.carriers.requests import PATH
from dmsg.net.websocket.byte_stream import StreamReader
from dmsg.net.websocket.frames import BINARY, NO_MASK, encode
from dmsg.noise.records import MAX_PLAINTEXT, OVERHEAD, RecordOpener, RecordSealer
from dmsg.noise.xk import XKHandshake
from dmsg.v2019.core.congestion import ROUTE_QUEUE_LIMIT
from dmsg.v2019.core.wire import ACCEPT, CLOSE, OK, REQUEST, Frame, FrameBuffer, encode_frame, encode_fwd_header
from dmsg.v2019.protocol import STALL_GRACE

TIMEOUT = 30.0
RECEIVE_SIZE = 256 * 1024
WRITE_SIZE = 256 * 1024
SEND_SIZE = 1024 * 1024
"""Maximum bytes that a sender passes to the kernel, or encrypts in TLS, before it looks at other connections."""


class Connection:
    """Connection of a client."""

    def __init__(
        self,
        address: tuple[str, int],
        server: PubKey,
        source: str = "",
        timeout: float = TIMEOUT,
        *,
        carrier: Carrier = PLAIN,
    ) -> None:
        """:param source: the address to come from.

        :param timeout: seconds to wait at most for each answer.
        :param carrier: what the connection lies in; its port is not used.
        """
        self.key = SecKey.generate()
        self.socket = socket.create_connection(address, timeout, (source, 0) if source else None)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if carrier.secure:
            self.socket = _tls(self.socket, carrier)
        is_websocket = carrier.kind in (WEBSOCKET, SECURE_WEBSOCKET)
        self._reader = StreamReader(masked=False) if is_websocket else None
        if is_websocket:
            self._upgrade()
        handshake = XKHandshake(self.key, server, aes_gcm=CIPHER is Cipher.AES_256_GCM)
        self.socket.sendall(self.wrapped(handshake.data_to_send()))
        while handshake.remote is None:
            data = self.socket.recv(4096)
            if not data:
                raise ConnectionError("server ended the handshake")
            handshake.receive_data(self.unwrapped(data))
            self.socket.sendall(self.wrapped(handshake.data_to_send()))
        assert handshake.keys is not None
        cipher = handshake.cipher
        self.sealer = RecordSealer(handshake.keys[0], cipher=cipher)
        self.opener = RecordOpener(handshake.keys[1], cipher=cipher)
        self._frames = FrameBuffer()
        self._scratch = bytearray(RECEIVE_SIZE + 2 * 65540)
        self._ready: list[Frame] = []
        self._take(handshake.trailing_data())
        assert self.receive().type == OK

    def _upgrade(self) -> None:
        self.socket.sendall(
            b"GET " + PATH + b" HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += self.socket.recv(4096)
        assert answer.startswith(b"HTTP/1.1 101 "), answer

    def wrapped(self, data: bytes | bytearray) -> bytes | bytearray:
        """Return what to send for ``data``: in a websocket, messages as large as the library's writes."""
        if self._reader is None or not data:
            return data
        pieces = (data[start : start + WRITE_SIZE] for start in range(0, len(data), WRITE_SIZE))
        return b"".join(encode(BINARY, piece, NO_MASK) for piece in pieces)

    def unwrapped(self, data: bytes) -> bytes:
        """Return the bytes of the link in what was received."""
        if self._reader is None:
            return data
        view, start, found = memoryview(data), 0, []
        while start < len(view):
            piece, start = self._reader.read(view, start, len(view))
            found.append(bytes(piece))
        return b"".join(found)

    def _take(self, data: bytes) -> None:
        if data:
            end = self.opener.open_into(data, self._scratch, 0)
            self._ready += self._frames.feed(bytes(self._scratch[:end]))

    def receive(self) -> Frame:
        """The next frame."""
        while not self._ready:
            data = self.socket.recv(RECEIVE_SIZE)
            if not data:
                raise ConnectionError("server closed the connection")
            self._take(self.unwrapped(data))
        return self._ready.pop(0)

    def send(self, data: bytes) -> None:
        """Send a record."""
        self.socket.sendall(self.wrapped(self.sealer.seal(data)))

    def raise_closed(self) -> None:
        """Read frames of the server that arrive while only this end sends.

        :raises ConnectionError: the server has closed the connection or one of its transports.
        """
        data = self.socket.recv(RECEIVE_SIZE)
        if not data:
            raise ConnectionError("server closed a sender")
        self._take(self.unwrapped(data))
        closed = [frame for frame in self._ready if frame.type == CLOSE]
        if closed:
            raise ConnectionError(
                f"server closed transport {closed[0].id}, reason {closed[0].payload.hex()}. If the receiver accepts no "
                f"data for {STALL_GRACE} s, its senders are not paused any longer, and a transport with more than "
                f"{ROUTE_QUEUE_LIMIT >> 20} MiB in the receiver's queue is closed."
            )

    def skip(self) -> None:
        """Read what there is, and look at none of it."""
        # With MSG_DONTWAIT alone, recv would wait, because Python polls a socket with a timeout first.
        while select.select([self.socket], [], [], 0)[0]:
            if not self.socket.recv(RECEIVE_SIZE):
                raise ConnectionError("server closed the connection")

    def read_available(self) -> bytes:
        """Return bytes that the non-blocking socket has; at least those of one ``recv``.

        :raises ConnectionError: the server has closed the connection.
        """
        if not isinstance(self.socket, ssl.SSLSocket):
            pieces = [self.socket.recv(RECEIVE_SIZE)]
        else:
            pieces = []
            # All records are read, because a selector does not see those that OpenSSL has already read.
            with suppress(ssl.SSLWantReadError):
                while not pieces or pieces[-1]:
                    pieces.append(self.socket.recv(RECEIVE_SIZE))
        if pieces and not pieces[-1]:
            raise ConnectionError("server closed the connection")
        return self.unwrapped(b"".join(pieces))

    def write_some(self, data: memoryview) -> int:
        """Send as much as the non-blocking socket takes, and return the number of bytes; at most ``SEND_SIZE``."""
        if not isinstance(self.socket, ssl.SSLSocket):
            return self.socket.send(data[:SEND_SIZE])
        sent, end = 0, min(len(data), SEND_SIZE)
        with suppress(ssl.SSLWantWriteError):
            while sent < end:  # One call sends one record.
                sent += self.socket.send(data[sent:end])
        return sent

    def close(self) -> None:
        """End it."""
        self.socket.close()


def _tls(connected: socket.socket, carrier: Carrier) -> ssl.SSLSocket:
    """Begin TLS as the library's clients do: with the ALPN name of the carrier, and without a check of the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols([ALPN[carrier.kind].decode()])
    return context.wrap_socket(connected)


def open_transport(initiator: Connection, responder: Connection, own_id: int) -> int:
    """REQUEST and ACCEPT; the responder's id."""
    payload = bytes(initiator.key.public + responder.key.public)
    initiator.send(encode_frame(REQUEST, own_id, payload))
    request = responder.receive()
    assert request.type == REQUEST, request
    responder.send(encode_frame(ACCEPT, request.id, payload))
    accept = initiator.receive()
    assert accept.type == ACCEPT and accept.id == own_id, accept
    return request.id


def close_transport(initiator: Connection, responder: Connection, own_id: int) -> None:
    """CLOSE, and wait until it is through."""
    initiator.send(encode_frame(CLOSE, own_id, b"\0"))
    assert responder.receive().type == CLOSE


def seal_frames(
    connection: Connection, own_id: int, size: int, count: int, coalesced: bool, mixed: bool = False
) -> bytes:
    """``count`` FWDs of ``size`` user bytes as records, one each or as full as they may be.

    :param mixed: sizes alternate around ``size``, so that no header follows its equal.
    """
    spread = (-size // 4, size // 4, 0, -size // 8, size // 8) if mixed else (0,)
    payload = bytes(2 * size)
    frames_each = max(1, MAX_PLAINTEXT // (size + (size // 4 if mixed else 0) + 7)) if coalesced else 1
    sequence = 0
    records = []
    while sequence < count:
        here = min(frames_each, count - sequence)
        frames = []
        for number in range(sequence, sequence + here):
            length = size + spread[number % len(spread)]
            frames.append(encode_fwd_header(own_id, number & 0xFFFF, length))
            frames.append(payload[:length])
        records.append(connection.sealer.seal(b"".join(frames)))
        sequence += here
    return bytes(connection.wrapped(b"".join(records)))


class _Counter:
    """Counts plaintext bytes in a stream of records without decrypting."""

    def __init__(self) -> None:
        self.plaintext = 0
        self.records = 0
        self._skip = 0
        self._head = b""

    def feed(self, data: bytes) -> None:
        position = 0
        end = len(data)
        while position < end:
            if self._skip:
                step = min(self._skip, end - position)
                self._skip -= step
                position += step
                continue
            piece = data[position : position + 2 - len(self._head)]
            self._head += piece
            position += len(piece)
            if len(self._head) < 2:
                continue
            (length,) = struct.unpack(">H", self._head)
            self._head = b""
            self._skip = length
            self.plaintext += length - OVERHEAD
            self.records += 1


def pump(senders: list[tuple[Connection, bytes]], receivers: list[Connection], expected: int) -> tuple[float, int]:
    """Send everything, receive ``expected`` bytes of plaintext at the receivers in all.

    :returns: seconds, and records received.
    :raises ConnectionError: the server has closed a transport or a connection, so bytes will be missing.
    """
    selector = selectors.DefaultSelector()
    counters = {}
    waiting = {}
    for connection, data in senders:
        connection.socket.setblocking(False)
        waiting[connection] = memoryview(data)
        selector.register(connection.socket, selectors.EVENT_WRITE | selectors.EVENT_READ, connection)
    for connection in receivers:
        connection.socket.setblocking(False)
        counters[connection] = _Counter()
        selector.register(connection.socket, selectors.EVENT_READ, connection)
    start = time.perf_counter()
    left = expected
    while left > 0:
        events = selector.select(TIMEOUT)
        if not events:
            raise TimeoutError(f"{left} of {expected} bytes did not arrive")
        for key, ready in events:
            connection = key.data
            if connection in counters:
                counter = counters[connection]
                before = counter.plaintext
                counter.feed(connection.read_available())
                left -= counter.plaintext - before
            elif ready & selectors.EVENT_READ:
                connection.raise_closed()
            else:
                view = waiting[connection]
                sent = connection.write_some(view)
                if sent == len(view):
                    selector.modify(connection.socket, selectors.EVENT_READ, connection)
                else:
                    waiting[connection] = view[sent:]
    took = time.perf_counter() - start
    selector.close()
    for connection in [one for one, _ in senders] + receivers:
        connection.socket.setblocking(True)
        connection.socket.settimeout(TIMEOUT)
    return took, sum(counter.records for counter in counters.values())
