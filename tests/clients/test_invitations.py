"""Invitations: what one says is read again; a mistake in copying is noticed."""

from __future__ import annotations

import base64
import hashlib

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.clients.invitations import CHECKSUM_SIZE, PREFIX, Invitation, NotAnInvitation, parse_invitation
from dmsg.keys import SecKey

KEY = SecKey(bytes(31) + b"\x01").public
HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6, network="2001::/16").map(lambda one: f"[{one}]"),
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z]{2,8}){0,3}", fullmatch=True),
)
PORTS = st.integers(1, 65535)


def crafted(host: bytes, path: bytes, own: bytes) -> str:
    """Return an invitation that an enemy wrote, with a right checksum around any bytes."""
    flags = (2 if own else 0) | (4 if path else 0)
    payload = bytes([flags]) + _name(host) + (9090).to_bytes(2, "big") + (_short(path) if path else b"")
    payload += bytes(KEY) + (_name(own) if own else b"") + (8080).to_bytes(2, "big") + _short(b"home")
    data = payload + hashlib.sha256(payload).digest()[:CHECKSUM_SIZE]
    return PREFIX + base64.b32encode(data).decode().rstrip("=").lower()


def _name(host: bytes) -> bytes:
    return b"\0" + _short(host)


def _short(text: bytes) -> bytes:
    return bytes([len(text)]) + text


class RoundTripTests(SynchronousTestCase):
    """An invitation that is written and read says the same."""

    @given(
        st.sampled_from(["http", "https"]),
        HOSTS,
        PORTS,
        st.sampled_from(["", "/dmsg", "/a/b"]),
        HOSTS,
        PORTS,
        st.from_regex(r"[a-z0-9][a-z0-9-]{0,30}", fullmatch=True),
    )
    @settings(max_examples=150, deadline=None)
    def test_every_field_survives_a_round_trip(
        self, scheme: str, host: str, port: int, path: str, own: str, server_port: int, name: str
    ) -> None:
        shown = "" if port == {"http": 80, "https": 443}[scheme] else f":{port}"
        invitation = Invitation(name, f"{scheme}://{host}{shown}{path}", KEY, f"{own}:{server_port}")
        self.assertEqual(parse_invitation(invitation.text), invitation)

    def test_an_invitation_of_an_ipv4_host_fits_into_a_terminal_line(self) -> None:
        text = Invitation("home", "http://203.0.113.5:9090", KEY, "203.0.113.5:8080").text
        self.assertTrue(text.startswith(PREFIX))
        self.assertLessEqual(len(f"dmsg join {text}"), 100)
        self.assertEqual(text, text.lower())

    def test_blanks_and_upper_case_of_a_copy_do_no_harm(self) -> None:
        invitation = Invitation("home", "http://203.0.113.5:9090", KEY, "203.0.113.5:8080")
        text = invitation.text
        self.assertEqual(parse_invitation(f"  {text[:40]}\n {text[40:].upper()} "), invitation)


class MistakeTests(SynchronousTestCase):
    """A mistake in copying never leads to another network."""

    text = Invitation("home", "https://relay.example.org/dmsg", KEY, "relay.example.org:8080").text

    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_a_wrong_character_is_noticed(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(len(PREFIX), len(self.text) - 1))
        other = data.draw(st.sampled_from([one for one in "abcdefghijklmnopqrstuvwxyz234567" if one != self.text[at]]))
        self.assertRaises(NotAnInvitation, parse_invitation, self.text[:at] + other + self.text[at + 1 :])

    @given(st.integers(0, 200))
    def test_an_invitation_that_was_cut_is_noticed(self, size: int) -> None:
        if size < len(self.text):
            self.assertRaises(NotAnInvitation, parse_invitation, self.text[:size])

    @given(st.binary(max_size=120))
    @settings(max_examples=300, deadline=None)
    def test_any_payload_with_a_right_checksum_is_read_or_refused_in_words(self, payload: bytes) -> None:
        data = payload + hashlib.sha256(payload).digest()[:CHECKSUM_SIZE]
        text = PREFIX + base64.b32encode(data).decode().rstrip("=").lower()
        try:
            self.assertEqual(parse_invitation(text).text, text)
        except NotAnInvitation as error:
            self.assertTrue(str(error))

    def test_hosts_and_paths_that_no_url_has_are_refused_in_words(self) -> None:
        for host, path, own in (
            (b"a\x1b[31mred", b"", b""),
            (b'a"b', b"", b""),
            (b"a.example", b"/\x1b[2J", b""),
            (b"a.example", b"/a b", b""),
            (b"a.example", b"/../../x", b""),
            (b"a.example", b"", b"b\x1b[31m"),
            (b"a.example", b"", b"b c"),
        ):
            with self.subTest(host=host, path=path, own=own):
                self.assertRaises(NotAnInvitation, parse_invitation, crafted(host, path, own))
        self.assertEqual(parse_invitation(crafted(b"a.example", b"/a/b-c_d~e.f%20", b"")).address, "a.example:8080")

    def test_the_error_for_other_text_shows_the_form_of_invitations(self) -> None:
        error = self.assertRaises(NotAnInvitation, parse_invitation, "5274-guitar-alpha-juice")
        self.assertIn("begins with dmsg1", str(error))

    def test_oversized_fields_are_refused_on_writing(self) -> None:
        for url in (
            "ftp://a:1",
            "http://u:p@a:1",
            "http://a:1/?x",
            "http://a:1/a/../b",
            "http://a:1/" + "x" * 300,
            "http://ä.example:1",
        ):
            with self.subTest(url=url):
                self.assertRaises(NotAnInvitation, lambda url=url: Invitation("home", url, KEY, "a:1").text)
