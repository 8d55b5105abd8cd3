"""Requests to discovery over plain sockets."""

from __future__ import annotations

import socket


def request(method: str, path: str, body: bytes = b"") -> bytes:
    """Return the bytes of a request."""
    return f"{method} {path} HTTP/1.1\r\nHost: discovery\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def ask(connection: socket.socket, wanted: bytes) -> tuple[int, bytes]:
    """Send a request; return status and body of its answer.

    :raises ConnectionError: there is none.
    """
    connection.sendall(wanted)
    answer = b""
    while b"\r\n\r\n" not in answer:
        answer += _some(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            while len(body) < int(line.partition(b":")[2]):
                body += _some(connection)
    return int(head.split()[1]), body


def _some(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise ConnectionError("no answer")
    return data
