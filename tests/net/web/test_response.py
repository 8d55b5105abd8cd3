"""Responses of HTTP/1.1, whole, in pieces and wrong."""

from __future__ import annotations

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.errors import DmsgError
from dmsg.net.web.response import MAX_HEAD, AnswerTooLong, HeadTooLong, MalformedResponse, ResponseParser

LIMIT = 1000
COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2;ext=1\r\nhe\r\n3 \r\nllo\r\n0\r\nX-Trailer: 1\r\n\r\n"
)
COMPLETE = {
    COUNTED: (200, b"hello", True),
    CHUNKED: (404, b"hello", True),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + COUNTED: (200, b"hello", True),
    b"HTTP/1.1 200 OK\ncontent-length:5\n\nhello": (200, b"hello", True),
    b"HTTP/1.1 200\r\nContent-Length: 5, 5\r\nContent-Length: 5\r\n\r\nhello": (200, b"hello", True),
    b"HTTP/1.1 200 OK\r\nX: a\r\n b:c\r\nContent-Length: 5\r\n\r\nhello": (200, b"hello", True),
    b"HTTP/1.1 204 No Content\r\n\r\n": (204, b"", True),
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n": (304, b"", True),
    b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n": (200, b"", True),
    b"HTTP/1.1 200 OK\r\nConnection: x, Close\r\nContent-Length: 5\r\n\r\nhello": (200, b"hello", False),
    b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello": (200, b"hello", False),
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n": (
        200,
        b"hello",
        False,
    ),
}
MALFORMED = (
    b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    b"HTTP/2 200 OK\r\n\r\n",
    b"HTTP/1.1 20 OK\r\n\r\n",
    b"HTTP/1.1 200OK\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * 2000,
)


def parse(data: bytes, size: int = 10**9) -> ResponseParser:
    parser = ResponseParser(LIMIT)
    for at in range(0, len(data), size):
        parser.receive_data(data[at : at + size])
    return parser


class ResponseTests(SynchronousTestCase):
    def test_complete_responses_in_pieces_of_any_size(self) -> None:
        for data, expected in COMPLETE.items():
            for size in (1, 2, 3, 7, 10**9):
                parser = parse(data, size)
                self.assertTrue(parser.is_complete, data)
                self.assertEqual((parser.status, parser.body, parser.keeps_connection), expected, data)
            self.assertFalse(parse(data[:-1]).is_complete, data)
            self.assertFalse(parse(data[:-1]).receive_end(), data)

    def test_a_body_until_the_end_of_the_connection(self) -> None:
        parser = parse(b"HTTP/1.1 200 OK\r\n\r\nhel")
        parser.receive_data(b"lo")
        self.assertFalse(parser.is_complete)
        self.assertTrue(parser.receive_end())
        self.assertEqual((parser.body, parser.keeps_connection), (b"hello", False))

    def test_a_connection_with_more_data_is_not_kept(self) -> None:
        parser = parse(COUNTED + b"H")
        self.assertEqual((parser.body, parser.is_complete, parser.keeps_connection), (b"hello", True, False))

    def test_malformed_responses(self) -> None:
        for data in MALFORMED:
            for size in (1, 10**9):
                with self.assertRaises(MalformedResponse, msg=data):
                    parse(data, size)

    def test_limit_of_the_body(self) -> None:
        for framing in (b"Content-Length: %d\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n%x\r\n"):
            head = b"HTTP/1.1 200 OK\r\n" + framing
            self.assertFalse(parse(head % LIMIT).is_complete)
            with self.assertRaises(AnswerTooLong):
                parse(head % (LIMIT + 1))
        self.assertFalse(parse(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(LIMIT)).is_complete)
        with self.assertRaises(AnswerTooLong):
            parse(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(LIMIT + 1))
        with self.assertRaises(AnswerTooLong):
            parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * (LIMIT + 1))

    def test_limit_of_everything_else(self) -> None:
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n"
        line = b"X: " + b"y" * 95 + b"\r\n"
        for data in (
            b"HTTP/1.1 200 OK\r\n" + line * (MAX_HEAD // 100 + 1),
            b"HTTP/1.1 200 OK\r\nX: " + b"y" * MAX_HEAD,
            b"HTTP/1.1 103 Early\r\n\r\n" * (MAX_HEAD // 22 + 1),
            chunked + line * (MAX_HEAD // 100 + 1),
        ):
            for size in (1000, 10**9):
                with self.assertRaises(HeadTooLong):
                    parse(data, size)
        self.assertTrue(parse(chunked + line * (MAX_HEAD // 100 - 5) + b"\r\n", 1000).is_complete)

    @given(st.binary(max_size=200), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n", CHUNKED[:60], COUNTED[:40]]))
    def test_any_bytes_raise_only_errors_of_dmsg(self, data: bytes, before: bytes) -> None:
        try:
            parser = parse(before + data, 3)
        except DmsgError:
            return
        self.assertLessEqual(len(parser.body), LIMIT)
