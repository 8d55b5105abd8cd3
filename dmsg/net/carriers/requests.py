"""HTTP requests at the port of a server to which clients connect, and the answers to them. No I/O."""

from __future__ import annotations

from dmsg.net.websocket.upgrade import MAX_HEAD, Upgrade, plain_upgrade

PATH = b"/dmsg"
"""Path at which a server accepts websockets."""
_PAGE = (
    "<!doctype html>\n<title>dmsg server</title>\n<p>This port belongs to a dmsg server, which relays encrypted "
    "connections between programs. There is nothing here for a browser.\n"
)
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    426: "Upgrade Required",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
_METHODS = frozenset((b"GET", b"HEAD"))


def is_http(data: bytes) -> bool:
    """Return whether a connection begins with an HTTP request, by its first byte.

    An HTTP method begins with a capital letter. Handshakes begin with other bytes: a Noise message with the high byte
    of its length, which is at most 15, and a message of the Messaging System with a brace.
    """
    return data[:1].isalpha() and data[:1].isupper()


class Request:
    """Parser of one HTTP request.

    :ivar upgrade: the request, once it is complete, if it asks for a websocket at ``PATH``.
    :ivar answer: answer to any other request, once that request is complete or invalid; empty before. The server closes
        the connection after the answer.
    """

    __slots__ = ("_data", "answer", "upgrade")

    def __init__(self) -> None:
        self._data = b""
        self.upgrade: Upgrade | None = None
        self.answer = b""

    def feed(self, data: bytes) -> None:
        """Process the next bytes."""
        self._data += data
        head, end, _ = self._data.partition(b"\r\n\r\n")
        first, line_end, _ = head.partition(b"\r\n")
        if len(head) > MAX_HEAD:
            self.answer = answer(431)
        elif (end or line_end) and not _is_request_line(first):
            # The request line is checked before the head is complete, because another protocol may never send an empty
            # line.
            self.answer = answer(400)
        elif end:
            self._decide(first)

    def _decide(self, first: bytes) -> None:
        upgrade = plain_upgrade(self._data)
        line = first.split(b" ")
        path = line[1].partition(b"?")[0]
        if upgrade is not None and path == PATH:
            self.upgrade = upgrade
        elif line[0] not in _METHODS:
            self.answer = answer(405)
        else:
            self.answer = answer(426 if path == PATH else 200 if path == b"/" else 404, body=line[0] == b"GET")


def _is_request_line(line: bytes) -> bool:
    words = line.split(b" ")
    return len(words) == 3 and words[2].startswith(b"HTTP/1.")


def answer(status: int, *, body: bool = True) -> bytes:
    """Return an HTTP answer that closes the connection.

    :param body: whether to include the body; False for a HEAD request.
    """
    page = _PAGE.encode() if status == 200 else f"{status} {_REASONS[status]}\n".encode()
    lines = [
        f"HTTP/1.1 {status} {_REASONS[status]}",
        f"Content-Type: text/{'html' if status == 200 else 'plain'}; charset=utf-8",
        f"Content-Length: {len(page)}",
        "Content-Security-Policy: default-src 'none'",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if status == 405:
        lines.append("Allow: GET, HEAD")
    if status == 426:
        lines += ["Upgrade: websocket"]
    return "\r\n".join([*lines, "", ""]).encode() + (page if body else b"")
