"""``5274-guitar-alpha-juice``: a nameplate and words of BIP-39's English list, 11 bits each.  No I/O.

The words are drawn so that they fit the number: a hash of both begins with
``CHECK_BITS`` zeros.  So what was mistyped is told before anything is asked, and
nobody else's code is tried by accident.  Whoever knows the number alone can
leave out the words that do not fit, so these bits do not count as secret.
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
"""Words of a code, by default: 33 bits, of which 26 are secret from who knows the number."""
MIN_WORDS = 3
"""Words that a code has at least: a code with a word forgotten is none, and not a wrong one."""
CHECK_BITS = 7
"""Bits of the words that follow from the number and the other words: of 128 mistyped codes 127 are told at once."""
CHECK = b"dmsg code check 1 "
"""Prefix of the hash from which the check digits are taken."""
MAX_DIGITS = 8
"""Digits of a nameplate at most."""
EXAMPLE = "5274-guitar-alpha-juice"
"""A code that help and messages show."""
MAX_WORDS = 12
"""Words of a code at most."""
DISTINCT = 4
"""Letters by which every word of the list differs from all others."""


class CodeError(DmsgError):
    """The typed text is not a code."""


@cache
def word_list() -> tuple[str, ...]:
    """2048 words of three to eight letters, sorted."""
    from mnemonic import Mnemonic  # reads a file, which most commands need not

    return tuple(Mnemonic("english").wordlist)


@dataclass(frozen=True, slots=True)
class Code:
    """A code that both sides know.

    :ivar nameplate: from 1 on; discovery and everybody may know it.
    :ivar words: secret until the code is used.
    """

    nameplate: int
    words: tuple[str, ...]

    @classmethod
    def make(cls, nameplate: int, words: int = WORDS, draw: Callable[[Sequence[str]], str] = choice) -> Code:
        """A new one.  :param draw: takes a word of the list; for tests."""
        while True:
            code = cls(nameplate, tuple(draw(word_list()) for _ in range(words)))
            if code.fits:
                return code

    @classmethod
    def parse(cls, text: str) -> Code:
        """Parse a typed code; blanks, any dashes, capitals, and words cut after four letters are understood.

        :raises CodeError: it is no code; says which word is none, and which was meant perhaps, or that words and number
            do not fit each other.
        """
        number, *words = _as_typed(text).lower().replace("-", " ").split() or [""]
        if not (number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS and int(number)):
            raise CodeError(f"{text[:80]!r} is not a code: a code begins with a number, like {EXAMPLE}")
        if not MIN_WORDS <= len(words) <= MAX_WORDS:
            older = "; a dmsg that shows two is too old for this one" if len(words) == 2 else ""
            raise CodeError(
                f"{text[:80]!r} is not a code: a code has a number and at least three words, like {EXAMPLE}{older}"
            )
        code = cls(int(number), tuple(_word(one) for one in words))
        if not code.fits:
            raise CodeError(
                f"{text[:80]!r} is mistyped: its number and words do not belong together; no attempt was made with it"
            )
        return code

    @property
    def fits(self) -> bool:
        """Whether number and words belong together, as those of every code do that was made."""
        found = sha256(CHECK + str(self).encode()).digest()
        return found[0] >> 8 - CHECK_BITS == 0

    @property
    def password(self) -> bytes:
        """Secret of the code: its words in lower case with dashes between them, ASCII."""
        return "-".join(self.words).encode()

    def __str__(self) -> str:
        return "-".join((str(self.nameplate), *self.words))

    def __repr__(self) -> str:
        return f"<Code {self.nameplate}-...>"  # no log shows the words


def looks_like_code(text: str) -> bool:
    """Whether somebody who typed this meant a code, right or not: a number, and something behind a dash or a blank."""
    number, _, rest = _as_typed(text).replace(" ", "-").partition("-")
    return number.isascii() and number.isdigit() and len(number) <= MAX_DIGITS and bool(rest)


def completions(text: str) -> list[str]:
    """Return what the last word of an unfinished code may become, the whole code each; a dash behind the first ones."""
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
    """Return the text with plain hyphens and spaces, of which phones and web pages make dashes and no-break spaces.

    U+2212, the minus sign, is of the category of mathematical signs; all other dashes are of ``Pd``.
    """
    plain = (
        "-" if one == "\u2212" or category(one) == "Pd" else " " if one.isspace() else one
        for one in normalize("NFKC", text)
        if category(one) != "Cf"  # soft hyphens, zero-width spaces, marks of direction
    )
    return "".join(plain).strip()


def _word(text: str) -> str:
    words = word_list()
    at = bisect_left(words, text)
    if at < len(words) and (words[at] == text or (len(text) >= DISTINCT and words[at].startswith(text))):
        return words[at]
    close = get_close_matches(text, words, 1, 0.6)
    meant = f"; {close[0]!r} perhaps?" if close else ""
    raise CodeError(f"{text[:40]!r} is not a word that codes use{meant}")
