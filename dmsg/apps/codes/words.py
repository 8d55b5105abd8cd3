"""Codes such as ``5274-guitar-alpha-juice``: a nameplate, and words of BIP-39's English list with 11 bits each.  No
I/O.

The words are drawn again until they match the nameplate: a hash of both begins with ``CHECK_BITS`` zero bits.  A
program thus recognises a mistyped code before it sends anything, and never tries another person's code by accident.  An
attacker who knows the nameplate can skip words that do not match it, so these bits are not counted as secret.
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

DEFAULT_WORDS = 3
"""Default number of words.  Three words have 33 bits; 26 of them stay unknown to a person who knows the nameplate."""
MIN_WORDS = 3
"""Minimum number of words.  A code of three words in which one is missing is therefore malformed, and does not count as
a wrong guess.
"""
CHECK_BITS = 7
"""Number of zero bits with which the hash of a valid code begins.  A mistyped code passes this check once in 128
times.
"""
CHECK_PREFIX = b"dmsg code check 1 "
"""Prefix of the bytes that are hashed to check a code."""
MAX_DIGITS = 8
"""Maximum number of digits of a nameplate."""
EXAMPLE = "5274-guitar-alpha-juice"
"""Example of a code, for help texts and messages."""
MAX_WORDS = 12
"""Maximum number of words of a code."""
MAX_RECEIVERS = 100
"""Maximum number of receivers of one code."""
DISTINCT_LETTERS = 4
"""Number of first letters that identify a word of the list."""


class CodeError(DmsgError):
    """Error: the typed text is not a code."""


@cache
def word_list() -> tuple[str, ...]:
    """Return the 2048 words of the list, which have three to eight letters, in alphabetical order."""
    from mnemonic import Mnemonic  # The import is delayed, because it reads a file that most commands do not need.

    return tuple(Mnemonic("english").wordlist)


@dataclass(frozen=True, slots=True)
class Code:
    """Code that two people share.

    :ivar nameplate: number from 1 on, which is not secret.
    :ivar words: words that must stay secret until the code is used.
    """

    nameplate: int
    words: tuple[str, ...]

    @classmethod
    def make(cls, nameplate: int, words: int = DEFAULT_WORDS, draw: Callable[[Sequence[str]], str] = choice) -> Code:
        """Draw a new code.

        :param words: number of words.
        :param draw: function that draws a word from the list; tests replace it.
        """
        while True:
            code = cls(nameplate, tuple(draw(word_list()) for _ in range(words)))
            if code.fits:
                return code

    @classmethod
    def parse(cls, text: str) -> Code:
        """Parse a typed code.  The text may have blanks, any kind of dash, capital letters, and words cut after four
        letters.

        :raises CodeError: the text is not a code, or its words do not match its number.  The error names an unknown
            word and the most similar word of the list.
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
        """Whether the words match the nameplate, as they do in every valid code."""
        found = sha256(CHECK_PREFIX + str(self).encode()).digest()
        return found[0] >> 8 - CHECK_BITS == 0

    @property
    def password(self) -> bytes:
        """Secret part of the code: its words in lower case, joined by dashes, in ASCII."""
        return "-".join(self.words).encode()

    def __str__(self) -> str:
        return "-".join((str(self.nameplate), *self.words))

    def __repr__(self) -> str:
        return f"<Code {self.nameplate}-...>"  # The words must not appear in logs.


def looks_like_code(text: str) -> bool:
    """Whether the user probably meant the text as a code, valid or not: a number, a dash or blank, and further text."""
    number, _, rest = _as_typed(text).replace(" ", "-").partition("-")
    return number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS and bool(rest)


def completions(text: str) -> list[str]:
    """Return the completions of a code whose last word is incomplete.

    :returns: for each possible last word the whole code, with a dash at the end if further words must follow.
    """
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
    """Return the text with ASCII hyphens and spaces in place of the similar characters that phones and web pages use.

    All characters of the Unicode category ``Pd`` count as hyphens, and so does U+2212, the minus sign.
    """
    plain = (
        "-" if one == "\u2212" or category(one) == "Pd" else " " if one.isspace() else one
        for one in normalize("NFKC", text)
        # Characters of the category Cf are removed: soft hyphens, zero-width spaces and marks of writing direction.
        if category(one) != "Cf"
    )
    return "".join(plain).strip()


def _find_word(text: str) -> str:
    words = word_list()
    at = bisect_left(words, text)
    if at < len(words) and (words[at] == text or (len(text) >= DISTINCT_LETTERS and words[at].startswith(text))):
        return words[at]
    close = get_close_matches(text, words, 1, 0.6)
    meant = f"; {close[0]!r} perhaps?" if close else ""
    raise CodeError(f"{text[:40]!r} is not a word that codes use{meant}")
