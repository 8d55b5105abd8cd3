"""Bodies of responses on a terminal."""

from __future__ import annotations

import io

from twisted.trial.unittest import SynchronousTestCase

from dmsg.cli.files import web_run
from dmsg.cli.files.web_run import BinaryBody, TerminalText


class TerminalTests(SynchronousTestCase):
    """A site must not control the terminal on which ``dmsg curl`` prints its answer."""

    def shown(self, *pieces: bytes, encoding: str = "utf-8") -> tuple[str, list[str]]:
        """Return what the terminal shows of a body, and the notices."""
        notices: list[str] = []
        self.patch(web_run, "notice", notices.append)
        output = io.BytesIO()
        screen = TerminalText(io.TextIOWrapper(output, encoding=encoding))
        for piece in pieces:
            screen.write(piece)
        screen.end()
        return output.getvalue().decode(encoding), notices

    def test_control_characters_are_replaced_and_the_user_is_told(self) -> None:
        for hostile in ("\x1b]0;evil\x07", "\x9b31m", "over\rwritten", "txt\u202egpj", "\b\b\b", "\x7f"):
            shown, notices = self.shown(f"a{hostile}b\n".encode())
            self.assertTrue(shown.removesuffix("\n").isprintable(), ascii(shown))
            self.assertEqual((shown[0], shown[-2:]), ("a", "b\n"))
            (one,) = notices
            self.assertIn("-o FILE", one)

    def test_text_stays_as_it_is(self) -> None:
        for text in ("", "a\tb\n", "\u00fcber\u00a0alles", "\U0001f469\u200d\U0001f680", "no line feed"):
            self.assertEqual(self.shown(text.encode()), (text, []))

    def test_line_breaks_of_http_become_line_feeds(self) -> None:
        self.assertEqual(self.shown(b"a\r\nb\r\n"), ("a\nb\n", []))
        self.assertEqual(self.shown(b"a\r", b"\nb\r", b"\n"), ("a\nb\n", []))
        self.assertEqual(self.shown(b"a\r", b"b\r")[0], "a\ufffdb\ufffd")

    def test_a_character_may_arrive_in_two_pieces(self) -> None:
        self.assertEqual(self.shown(b"\xc3", b"\xbc\xe2\x80", b"\xae")[0], "\u00fc\ufffd")
        self.assertEqual(self.shown(b"cut \xc3")[0], "cut \ufffd")

    def test_a_terminal_without_these_characters(self) -> None:
        self.assertEqual(self.shown("\u00fc\x1b".encode(), encoding="ascii")[0], "??")

    def test_other_bodies_are_refused(self) -> None:
        error = self.assertRaises(BinaryBody, self.shown, b"text, and then ", b"\x89PNG\0")
        self.assertIn("-o FILE", str(error))
