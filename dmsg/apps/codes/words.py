"""Codes such as ``5274-guitar-alpha-juice``: a nameplate and words of BIP-39's English list, 11 bits each.  No I/O.

The words are drawn so that they fit the number: a hash of both begins with ``CHECK_BITS`` zeros.  So a mistyped code is
recognised before anything is sent, and nobody else's code is tried by accident.  An attacker who knows the number can
skip words that do not fit, so these bits are not counted as secret.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from secrets import choice
from unicodedata import category, normalize

from dmsg.errors import DmsgError

WORDS = 3
"""Default number of words: 33 bits, of which 26 are secret from those who know the number."""
MIN_WORDS = 3
"""Minimum number of words.  So a code with a word left out is malformed, and is not counted as a wrong guess."""
CHECK_BITS = 7
"""Number of bits of the words that follow from the number and the other words: 127 of 128 mistyped codes are
recognised."""
CHECK = b"dmsg code check 1 "
"""Prefix of the bytes whose hash checks a code."""
MAX_DIGITS = 8
"""Maximum number of digits of a nameplate."""
EXAMPLE = "5274-guitar-alpha-juice"
"""Code to show in help texts and messages."""
MAX_WORDS = 12
"""Maximum number of words of a code."""
MAX_RECEIVERS = 100
"""Maximum number of receivers of one code."""
DISTINCT = 4
"""Number of letters that identify a word of the list."""


class CodeError(DmsgError):
    """Error: the typed text is not a code."""


@cache
def word_list() -> tuple[str, ...]:
    """Return the list's 2048 words of three to eight letters, sorted."""
    from mnemonic import Mnemonic  # The import is here, because it reads a file that most commands do not need.

    return tuple(Mnemonic("english").wordlist)


@dataclass(frozen=True, slots=True)
class Code:
    """Code that both sides know.

    :ivar nameplate: number from 1 on; discovery and everybody else may know it.
    :ivar words: words that must stay secret until the code is used.
    """

    nameplate: int
    words: tuple[str, ...]

    @classmethod
    def make(cls, nameplate: int, words: int = WORDS, draw: Callable[[Sequence[str]], str] = choice) -> Code:
        """Make a new code.

        :param draw: draws a word from the list; for tests.
        """
        while True:
            code = cls(nameplate, tuple(draw(word_list()) for _ in range(words)))
            if code.fits:
                return code

    @classmethod
    def parse(cls, text: str) -> Code:
        """Parse a typed code; blanks, any dashes, capitals, and words cut after four letters are understood.

        :raises CodeError: the text is no code, or its words and number do not fit.  The error names an unknown word and
            the word that was perhaps meant.
        """
        number, *words = _as_typed(text).lower().replace("-", " ").split() or [""]
        if not (number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS and int(number)):
            raise CodeError(f"{text[:80]!r} is not a code: a code begins with a number, like {EXAMPLE}")
        if not MIN_WORDS <= len(words) <= MAX_WORDS:
            older = "; a dmsg that shows two is too old for this one" if len(words) == 2 else ""
            raise CodeError(
                f"{text[:80]!r} is not a code: a code has a number and at least three words, like {EXAMPLE}{older}"
            )
        code = cls(int(number), tuple(_find_word(one) for one in words))
        if not code.fits:
            raise CodeError(
                f"{text[:80]!r} is mistyped: its number and words do not match; it was not tried, so it is still valid"
            )
        return code

    @property
    def fits(self) -> bool:
        """Whether number and words fit each other, as they do in every genuine code."""
        found = sha256(CHECK + str(self).encode()).digest()
        return found[0] >> 8 - CHECK_BITS == 0

    @property
    def password(self) -> bytes:
        """Secret of the code: its words in lower case with dashes between them, ASCII."""
        return "-".join(self.words).encode()

    def __str__(self) -> str:
        return "-".join((str(self.nameplate), *self.words))

    def __repr__(self) -> str:
        return f"<Code {self.nameplate}-...>"  # The words are left out, because they must not appear in logs.


def looks_like_code(text: str) -> bool:
    """Whether the typed text was meant as a code, valid or not: a number, and something after a dash or a blank."""
    number, _, rest = _as_typed(text).replace(" ", "-").partition("-")
    return number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS and bool(rest)


def completions(text: str) -> list[str]:
    """Return the completions of an unfinished code's last word, each as the whole code, with a dash if more words must
    follow."""
    before, dash, last = _as_typed(text).rpartition("-")
    if not dash or not looks_like_code(f"{before}-x"):
        return []
    words = word_list()
    at = bisect_left(words, last.lower())
    found = []
    while at < len(words) and words[at].startswith(last.lower()):
        found.append(f"{before}-{words[at]}" + ("" if before.count("-") >= MIN_WORDS - 1 else "-"))
        at += 1
    return found


def _as_typed(text: str) -> str:
    """Return the text with plain hyphens and spaces, because phones and web pages replace them by other characters.

    U+2212, the minus sign, is in the category of mathematical signs; all other dashes are in ``Pd``.
    """
    plain = (
        "-" if one == "\u2212" or category(one) == "Pd" else " " if one.isspace() else one
        for one in normalize("NFKC", text)
        # Characters of this category are removed: soft hyphens, zero-width spaces and marks of writing direction.
        if category(one) != "Cf"
    )
    return "".join(plain).strip()


def _find_word(text: str) -> str:
    words = word_list()
    at = bisect_left(words, text)
    if at < len(words) and (words[at] == text or (len(text) >= DISTINCT and words[at].startswith(text))):
        return words[at]
    close = get_close_matches(text, words, 1, 0.6)
    meant = f"; {close[0]!r} perhaps?" if close else ""
    raise CodeError(f"{text[:40]!r} is not a word that codes use{meant}")
