"""Headers of the PROXY protocol: which headers are accepted, whatever pieces they arrive in."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from hypothesis import example, given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.carriers.proxy_header import MAX_LENGTH, MAX_LINE, SIGNATURE, ProxyHeader, ProxyHeaderError

V4 = IPv4Address("203.0.113.9").packed + IPv4Address("10.0.0.1").packed + b"\x12\x34\x01\xbb"
V6 = IPv6Address("2001:db8::9").packed + IPv6Address("::1").packed + b"\x12\x34\x01\xbb"
EXTENSION = b"\x04\x00\x03abc"


def version_2(family: int, block: bytes, command: int = 1, version: int = 2) -> bytes:
    """Return a header with the family and protocol in one byte."""
    return SIGNATURE + bytes([version << 4 | command, family]) + len(block).to_bytes(2, "big") + block


ACCEPTED = {
    b"PROXY TCP4 203.0.113.9 10.0.0.1 4711 443\r\n": "203.0.113.9",
    b"PROXY TCP4 255.255.255.255 255.255.255.255 65535 65535\r\n": "255.255.255.255",
    b"PROXY TCP6 2001:0DB8:0::9 ::1 0 443\r\n": "2001:db8::9",
    b"PROXY UNKNOWN\r\n": "",
    b"PROXY UNKNOWN 1.2.3.4 what ever\r\n": "",
    version_2(0x11, V4): "203.0.113.9",
    version_2(0x11, V4 + EXTENSION * 5): "203.0.113.9",
    version_2(0x21, V6): "2001:db8::9",
    version_2(0x12, V4): "",
    version_2(0x31, bytes(216)): "",
    version_2(0x00, b""): "",
    version_2(0x00, b"\1\2\3"): "",
    version_2(0x11, V4, command=0): "",
    version_2(0xFF, b"x" * 100, command=0): "",
    version_2(0x11, V4 + b"\4" + (MAX_LENGTH - 15).to_bytes(2, "big") + bytes(MAX_LENGTH - 15)): "203.0.113.9",
}
REFUSED = (
    b"\x00\x61" + bytes(97),
    b"GET / HTTP/1.1\r\n\r\n",
    b"PROXY TCP4 203.0.113.9 10.0.0.1 4711 443\n",
    b"proxy TCP4 203.0.113.9 10.0.0.1 4711 443\r\n",
    b"PROXY  TCP4 203.0.113.9 10.0.0.1 4711 443\r\n",
    b"PROXY TCP4 203.0.113.9 10.0.0.1 4711 443 \r\n",
    b"PROXY TCP4 203.0.113.9 10.0.0.1 4711\r\n",
    b"PROXY TCP4 203.0.113.09 10.0.0.1 4711 443\r\n",
    b"PROXY TCP4 203.0.113.256 10.0.0.1 4711 443\r\n",
    b"PROXY TCP4 ::1 ::1 4711 443\r\n",
    b"PROXY TCP6 203.0.113.9 10.0.0.1 4711 443\r\n",
    b"PROXY TCP4 203.0.113.9 10.0.0.1 04711 443\r\n",
    b"PROXY TCP4 203.0.113.9 10.0.0.1 4711 65536\r\n",
    b"PROXY TCP4 203.0.113.9 10.0.0.1 4711 443\r\r\n",
    b"PROXY UDP4 203.0.113.9 10.0.0.1 4711 443\r\n",
    b"PROXY UNKNOWNX\r\n",
    b"PROXY UNKNOWN a\nb\r\n",
    b"PROXY UNKNOWN " + b"a" * MAX_LINE,
    b"\r\n\r\n\0\r\nQUIT\r",
    version_2(0x11, V4, version=1),
    version_2(0x11, V4, command=2),
    version_2(0x11, V4[:-1]),
    version_2(0x21, V4),
    version_2(0x31, V6),
    version_2(0x41, bytes(300)),
    version_2(0x13, V4),
    version_2(0x11, V4 + b"\4"),
    version_2(0x11, V4 + b"\4\0\4abc"),
    version_2(0x00, bytes(MAX_LENGTH + 1)),
    version_2(0xFF, bytes(MAX_LENGTH + 1), command=0),
)


def outcome(pieces: list[bytes]) -> tuple[str, bytes] | None:
    """Return the client, and the bytes behind the header; None if the header is refused or incomplete."""
    header, pieces = ProxyHeader(), list(pieces)
    try:
        while pieces:
            if header.feed(pieces.pop(0)):
                return header.client, b"".join([header.rest, *pieces])
    except ProxyHeaderError:
        return None
    return None


class ProxyHeaderTests(SynchronousTestCase):
    """The parser."""

    def test_valid_headers_name_the_client_or_nobody(self) -> None:
        for header, client in ACCEPTED.items():
            with self.subTest(header=header[:60]):
                self.assertEqual(outcome([header + b"\x00\x61rest"]), (client, b"\x00\x61rest"))

    def test_everything_else_is_refused(self) -> None:
        for header in REFUSED:
            with self.subTest(header=header[:60]):
                self.assertRaises(ProxyHeaderError, ProxyHeader().feed, header)

    def test_a_header_is_refused_at_its_first_wrong_byte(self) -> None:
        for data in (b"G", b"\0", b"PROXX", b"\r\n\r\n\1", SIGNATURE + b"\x11", SIGNATURE + b"\x21\x11\xff\xff"):
            with self.subTest(data=data):
                self.assertRaises(ProxyHeaderError, ProxyHeader().feed, data)

    def test_no_more_is_kept_than_the_longest_header(self) -> None:
        for header in (b"PROXY UNKNOWN " + b"a" * 10_000, version_2(0, bytes(60_000))):
            parser, kept = ProxyHeader(), 0
            with self.assertRaises(ProxyHeaderError):
                for at in range(len(header)):
                    parser.feed(header[at : at + 1])
                    kept = len(parser._data)
            self.assertLess(kept, 16 + MAX_LENGTH)

    def test_every_single_cut_gives_the_same(self) -> None:
        for header in (*ACCEPTED, *REFUSED):
            data = header[:400] + b"rest" if len(header) < 400 else header + b"rest"
            whole = outcome([data])
            for at in range(1, min(len(data), 120)):
                self.assertEqual(outcome([data[:at], data[at:]]), whole, (data[:60], at))
            self.assertEqual(outcome([data[at : at + 1] for at in range(len(data))]), whole, data[:60])

    @given(
        st.one_of(
            st.sampled_from([*ACCEPTED, *REFUSED]),
            st.binary(max_size=60).map(lambda tail: b"PROXY " + tail),
            st.binary(max_size=60).map(lambda tail: SIGNATURE + tail),
            st.binary(max_size=60),
        ),
        st.lists(st.integers(1, 40), max_size=30),
    )
    @example(b"PROXY UNKNOWN\r\n", [13, 1])
    @settings(max_examples=500, deadline=None)
    def test_any_cuts_of_any_bytes_give_the_same(self, data: bytes, sizes: list[int]) -> None:
        pieces, at = [], 0
        for size in sizes:
            pieces.append(data[at : at + size])
            at += size
        self.assertEqual(outcome([*pieces, data[at:]]), outcome([data]))
