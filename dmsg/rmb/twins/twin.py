"""Registry entry of a twin, and the signed statements that create and change such an entry."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from dmsg.base.printable import without_userinfo
from dmsg.net.addresses import is_host
from dmsg.rmb.errors import IdentityError, NotTheOwner, RegistryRefused, SignatureInvalid
from dmsg.rmb.twins.address import MAX_TWIN
from dmsg.rmb.twins.identity import Signer, parse_account, ss58, verify

MAX_RELAY = 1024
"""Maximum size in bytes of the text that lists a twin's relays."""
MAX_RELAYS = 4
"""Maximum number of relays of a twin."""
MAX_PK = 128
"""Maximum size of an encryption key in bytes. Keys of RMB have 33 bytes."""
MAX_COUNTER = 2**63 - 1
SIGNED_LABEL = "dmsg-rmb-twin-1"

_DOMAIN = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*")


def check_relay(text: str) -> str:
    """Check the registry's name for a relay, and return it in canonical form.

    The name is a domain, for a relay at ``https://DOMAIN/``, or a URL.

    :raises ValueError: the text has neither form; the error message is one line.
    """
    if _DOMAIN.fullmatch(text):
        return text
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and parts.path in ("", "/") and not (parts.query or parts.fragment or parts.username)
        good = good and _is_host(parts.hostname or "") and text.isascii() and text.isprintable() and " " not in text
    except ValueError:
        good = False
    if not good or "_" in text:
        raise ValueError(f"{text[:80]!r} is not a relay: a domain, or a URL such as http://127.0.0.1:8080, is needed")
    return text.rstrip("/")


def _is_host(host: str) -> bool:
    if _DOMAIN.fullmatch(host):
        return True
    return ":" in host and "%" not in host and is_host(host)


def relay_url(relay: str) -> str:
    """Return the URL to which other relays send POST requests with messages for this relay."""
    return f"{relay}/" if "://" in relay else f"https://{relay}/"


def relay_of_websocket(url: str) -> str:
    """Return the registry's name for the relay that is reached at a ``ws:`` or ``wss:`` URL.

    :raises ValueError: the text is not such a URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("ws", "wss") or not host or parts.username or parts.query or parts.path not in ("", "/"):
        raise ValueError(f"{without_userinfo(url)[:80]!r} is not the URL of a relay such as wss://relay.example.org")
    if parts.scheme == "wss" and port in (None, 443) and _DOMAIN.fullmatch(host):
        return host
    if not _is_host(host):
        raise ValueError(f"{without_userinfo(url)[:80]!r} is not the URL of a relay such as wss://relay.example.org")
    shown = f"[{host}]" if ":" in host else host
    scheme = "https" if parts.scheme == "wss" else "http"
    return f"{scheme}://{shown}" + (f":{port}" if port is not None else "")


@dataclass(frozen=True)
class Twin:
    """Registry entry of a twin.

    :ivar account: public key that signs for the twin, 32 bytes.
    :ivar relay: names of the twin's relays, joined with ``_``; None if none was ever registered.
    :ivar pk: encryption key, secp256k1, 33 bytes; None if messages to the twin are not encrypted.
    :ivar strict: whether the twin makes strict signatures and accepts bound payloads, see
        :mod:`dmsg.rmb.envelope.wire`.
    :ivar counter: number that the owner increases with each signed statement.
    :ivar signature: owner's signature over :meth:`signed`; empty if the registry has no signature.
    """

    id: int
    account: bytes
    relay: str | None = None
    pk: bytes | None = None
    strict: bool = False
    counter: int = 0
    signature: bytes = b""

    @property
    def relays(self) -> frozenset[str]:
        """Names of the twin's relays. An empty text gives a set with one empty name, as in the reference
        implementation."""
        return frozenset() if self.relay is None else frozenset(self.relay.split("_"))

    @property
    def address(self) -> str:
        """Account of the twin as SS58 text."""
        return ss58(self.account)

    def signed(self) -> bytes:
        """Return the bytes that the owner signs: six lines of UTF-8. They contain the account but not the id."""
        relay = "" if self.relay is None else self.relay
        pk = "" if self.pk is None else self.pk.hex()
        strict = "strict" if self.strict else ""
        return "\n".join((SIGNED_LABEL, self.account.hex(), str(self.counter), relay, pk, strict)).encode()

    def sign(self, signer: Signer) -> Twin:
        """Return a copy that has the owner's signature."""
        return replace(self, signature=signer.sign(self.signed()))

    def check(self) -> None:
        """Check all limits and the owner's signature.

        :raises RegistryRefused: a value exceeds its limit, or the owner has not signed the statement.
        """
        if not 0 <= self.counter <= MAX_COUNTER:
            raise RegistryRefused(f"counter is not between 0 and {MAX_COUNTER}")
        if self.pk is not None and len(self.pk) > MAX_PK:
            raise RegistryRefused(f"pk has more than {MAX_PK} bytes")
        if self.relay:
            if len(self.relay.encode()) > MAX_RELAY:
                raise RegistryRefused(f"relay has more than {MAX_RELAY} bytes")
            if len(self.relays) > MAX_RELAYS:
                raise RegistryRefused(f"a twin has more than {MAX_RELAYS} relays")
            for one in self.relays:
                try:
                    check_relay(one)
                except ValueError as error:
                    raise RegistryRefused(str(error)) from None
        try:
            verify(self.signature, self.signed(), self.account)
        except SignatureInvalid as error:
            raise NotTheOwner(f"the statement is not signed by the twin's owner: {error}") from None

    def as_dict(self) -> dict[str, object]:
        """Return the entry as a dictionary that JSON can encode."""
        return {
            "id": self.id,
            "account": self.account.hex(),
            "relay": self.relay,
            "pk": None if self.pk is None else self.pk.hex(),
            "strict": self.strict,
            "counter": self.counter,
            "signature": self.signature.hex(),
        }

    def to_json(self) -> bytes:
        """Return the entry as JSON text."""
        return json.dumps(self.as_dict(), separators=(",", ":")).encode()

    @classmethod
    def from_dict(cls, content: object) -> Twin:
        """Build a twin from a parsed JSON object.

        :raises RegistryRefused: members are missing or of the wrong type.
        """
        if not isinstance(content, dict):
            raise RegistryRefused("the description of a twin is not a JSON object")

        def number(name: str, limit: int) -> int:
            value = content.get(name, 0)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= limit:
                raise RegistryRefused(f"{name} is not a number from 0 to {limit}")
            return value

        def data(name: str) -> bytes | None:
            value = content.get(name)
            if value is None:
                return None
            try:
                return bytes.fromhex(value.removeprefix("0x"))
            except (AttributeError, ValueError):
                raise RegistryRefused(f"{name} is not hexadecimal") from None

        relay, strict = content.get("relay"), content.get("strict", False)
        if relay is not None and not isinstance(relay, str):
            raise RegistryRefused("relay is not a text")
        if not isinstance(strict, bool):
            raise RegistryRefused("strict is neither true nor false")
        account = content.get("account")
        try:
            parsed = parse_account(account) if isinstance(account, str) else b""
        except IdentityError as error:
            raise RegistryRefused(f"account is not valid: {error}") from None
        if not parsed:
            raise RegistryRefused("account is missing")
        return cls(
            number("id", MAX_TWIN),
            parsed,
            relay,
            data("pk"),
            strict,
            number("counter", MAX_COUNTER),
            data("signature") or b"",
        )
