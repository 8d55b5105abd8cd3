"""Token with which a twin opens a session at a relay: a JWT, which is the whole query string of the URL.

Its ``alg`` says RS512, as in the reference implementation. But the signature is made with the twin's key: 65 bytes over
the encoded text ``header.claims``.
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dmsg.base.priority_queue import PriorityQueue
from dmsg.rmb.errors import SignatureInvalid, TokenError
from dmsg.rmb.twins.address import MAX_SID, MAX_TWIN, Session
from dmsg.rmb.twins.identity import Signer, verify

ALGORITHM = "RS512"
TTL = 300
"""Seconds for which the tokens that this module makes are valid."""
MAX_TTL = 24 * 3600
"""Maximum remaining validity of a token in seconds. The reference implementation has no such limit."""
MAX_AGE_AHEAD = 300
"""Maximum seconds by which a twin's clock may be ahead of the relay's clock."""
MAX_TOKEN = 4096
"""Maximum size of a token in bytes."""


@dataclass(frozen=True)
class Token:
    """Parsed token.

    :ivar issued: time of issue, in seconds since 1970.
    :ivar expires: time of expiry, in seconds since 1970.
    :ivar signed: bytes that ``signature`` signs.
    :ivar resends: whether the session requests confirmations of its messages by pings, and sends unconfirmed messages
        again.
    """

    session: Session
    issued: int
    expires: int
    signed: bytes
    signature: bytes
    resends: bool = False

    def check_times(self, now: int, limit: int | None = MAX_TTL) -> None:
        """Check that the token is valid now.

        :param limit: maximum remaining validity in seconds; None means no limit.
        :raises TokenError: the token has expired, is not valid yet, or is valid for too long.
        """
        if now > self.expires:
            raise TokenError("jwt has expired")
        if self.issued > now + MAX_AGE_AHEAD:
            raise TokenError("jwt: was issued in the future")
        if limit is not None and self.expires > now + limit:
            raise TokenError(f"jwt: is valid for more than {limit} seconds")

    def check_signature(self, account: bytes) -> None:
        """Check that ``account`` has signed the token.

        :raises TokenError: the signature is not valid.
        """
        try:
            verify(self.signature, self.signed, account)
        except SignatureInvalid:
            raise TokenError("jwt: Invalid signature") from None


def _encode(data: bytes) -> bytes:
    return urlsafe_b64encode(data).rstrip(b"=")


def _decode(part: bytes) -> bytes:
    if part.rstrip(b"=") != part or b"+" in part or b"/" in part:
        raise TokenError("jwt: Invalid base64")
    try:
        return urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except Base64Error:
        raise TokenError("jwt: Invalid base64") from None


def _object(part: bytes) -> dict[str, object]:
    try:
        content = json.loads(_decode(part))
    except (ValueError, RecursionError) as error:
        if isinstance(error, TokenError):
            raise
        raise TokenError("jwt: not JSON") from None
    if not isinstance(content, dict):
        raise TokenError("jwt: not a JSON object")
    return content


@lru_cache(64)
def _header(part: bytes) -> Mapping[str, object]:
    """Decode the header. Results are cached, because nearly all tokens have the same header."""
    return _object(part)


def make(
    signer: Signer, session: Session, now: int, ttl: int = TTL, *, unique: bool = True, resends: bool = True
) -> str:
    """Return a token for ``session`` that is valid for ``ttl`` seconds.

    :param unique: whether to add a random claim ``jti``. A relay may accept each token only once.
    :param resends: whether to add a claim ``ack``. It says that the session sends unconfirmed messages again; relays of
        the reference implementation ignore it.
    """
    claims: dict[str, object] = {"sub": session.twin, "sid": session.sid, "iat": now, "exp": now + ttl}
    if resends:
        claims["ack"] = True
    if unique:
        claims["jti"] = os.urandom(8).hex()
    header = _encode(json.dumps({"alg": ALGORITHM}, separators=(",", ":")).encode())
    signed = header + b"." + _encode(json.dumps(claims, separators=(",", ":")).encode())
    return (signed + b"." + _encode(signer.sign(signed))).decode()


def _is_text(text: str) -> bool:
    """Whether ``text`` can be encoded as UTF-8. JSON may contain unpaired surrogates, but an envelope cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(claims: dict[str, object], name: str, limit: int) -> int:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
        raise TokenError(f"jwt: {name} is missing or not a number")
    return value


def parse(text: bytes) -> Token:
    """Parse a token without verifying its signature or times.

    :raises TokenError: the text is not a token.
    """
    if len(text) > MAX_TOKEN:
        raise TokenError(f"jwt: more than {MAX_TOKEN} bytes")
    parts = text.split(b".")
    if len(parts) < 2:
        raise TokenError("jwt: No claims component found in token string")
    if len(parts) < 3:
        raise TokenError("jwt: No signature component found in token string")
    if len(parts) > 3:
        raise TokenError("jwt: Too many components found in token string")
    header, claims = _header(parts[0]), _object(parts[1])
    algorithm = header.get("alg")
    if algorithm != ALGORITHM:
        name = algorithm.capitalize() if isinstance(algorithm, str) else "none"
        raise TokenError(f"jwt: Expected algorithm type {name[:20]} but found Rs512")
    if header.get("typ", "JWT") not in ("JWT", None):
        raise TokenError("jwt: typ is not JWT")
    sid = claims.get("sid")
    if sid is not None and not (isinstance(sid, str) and len(sid) <= MAX_SID and _is_text(sid)):
        raise TokenError(f"jwt: sid is not a text of at most {MAX_SID} characters")
    return Token(
        Session(_number(claims, "sub", MAX_TWIN), sid),
        _number(claims, "iat", 2**64 - 1),
        _number(claims, "exp", 2**64 - 1),
        parts[0] + b"." + parts[1],
        _decode(parts[2]),
        claims.get("ack") is True,
    )


class UsedTokens:
    """Tokens that have opened a connection. Each is remembered until it expires.

    Above the limit, the twin with most tokens loses the token that it used first. So no twin can make the tokens of
    other twins usable again.

    :param limit: maximum number of tokens that are remembered.
    """

    def __init__(self, limit: int) -> None:
        self._most = limit
        self._count = 0
        self._of: dict[int, OrderedDict[bytes, int]] = {}
        self._counts_by_twin: PriorityQueue[int] = PriorityQueue()
        self._ends: PriorityQueue[int] = PriorityQueue()

    def __len__(self) -> int:
        return self._count

    def first_use(self, parsed: Token, now: int) -> bool:
        """Mark a token as used, and return whether this is its first use.

        :param now: seconds since 1970.
        """
        self._forget(now)
        # The hash covers the decoded signature, because base64 has several encodings of the same signature.
        key = hashlib.sha256(parsed.signed + b"." + parsed.signature).digest()
        twin = parsed.session.twin
        used = self._of.setdefault(twin, OrderedDict())
        if key in used:
            return False
        used[key] = parsed.expires
        self._count += 1
        self._rank(twin)
        if self._count > self._most:
            greediest = self._counts_by_twin.first()
            assert greediest is not None
            self._drop(greediest)
        return True

    def _forget(self, now: int) -> None:
        while (twin := self._ends.first()) is not None and self._ends.rank(twin) < now:
            self._drop(twin)

    def _drop(self, twin: int) -> None:
        """Forget the token that ``twin`` used first."""
        self._of[twin].popitem(last=False)
        self._count -= 1
        self._rank(twin)

    def _rank(self, twin: int) -> None:
        used = self._of[twin]
        if used:
            self._counts_by_twin.put(twin, -len(used))
            self._ends.put(twin, next(iter(used.values())))
        else:
            del self._of[twin]
            self._counts_by_twin.remove(twin)
            self._ends.remove(twin)
