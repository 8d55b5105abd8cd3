"""Mutants that no test can notice, each with the reason."""

from __future__ import annotations

_CODES = "dmsg/apps/codes"
_MESSAGING = "dmsg/messaging/core"
_NOISE = "dmsg/noise"
_RMB = "dmsg/rmb"
_NET = "dmsg/net"
_STREAMS = "dmsg/streams/core"
_V2019 = "dmsg/v2019/core"

ANY = "*"
"""Placeholder for the changed line in an entry that holds for every change of the line."""
_ONLY_SPEED = "both branches give the same bytes; one of them is quicker"
_AT_MOST = "the number is never larger"
_SET_BEFORE = "the value is set before it is read"
_AT_LEAST = "the number is never smaller"
_NO_EARLIER = "a reactor's clock never shows a time before 0"

EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        f"{_CODES}/words.py",
        "if at < len(words) and (words[at] == text or (len(text) >= DISTINCT_LETTERS and words[at].startswith(text))):",
        "if at != len(words) and "
        "(words[at] == text or (len(text) >= DISTINCT_LETTERS and words[at].startswith(text))):",
    ): _AT_MOST,
    (
        f"{_CODES}/words.py",
        "return found[0] >> 8 - CHECK_BITS == 0",
        "return found[0] >> 8 - CHECK_BITS <= 0",
    ): "a byte is never negative",
    (f"{_CODES}/words.py", "@cache", ""): "the list is read from its file again",
    (
        f"{_CODES}/words.py",
        'meant = f"; {close[0]!r} perhaps?" if close else ""',
        'meant = f"; {close[ -1]!r} perhaps?" if close else ""',
    ): "at most one word is asked for",
    (
        "dmsg/discovery/entries/nameplates.py",
        "while found < len(DIGITS) - 1 and in_use > MAX_DENSITY * 10 ** DIGITS[found]:",
        "while found < len(DIGITS) ^ 1 and in_use > MAX_DENSITY * 10 ** DIGITS[found]:",
    ): "there are three lengths, and 3 ^ 1 is 3 - 1",
    (
        "dmsg/discovery/entries/rules.py",
        'return f"{(timestamp + _UNIX_TO_YEAR_1 + INT64) % UINT64:020d}"',
        'return f"{(timestamp + _UNIX_TO_YEAR_1 - INT64) % UINT64:020d}"',
    ): "INT64 is half of UINT64",
    (
        "dmsg/discovery/entries/dialects.py",
        "for entry in forms[:-1]:",
        "for entry in forms[:1]:",
    ): "there are two forms at most",
    (
        f"{_MESSAGING}/congestion.py",
        "end.backlog.append(bytearray(data) if len(data) < MIN_PIECE_SIZE else data)",
        ANY,
    ): "a piece that may not be joined is sent as it is: the same bytes",
    (
        f"{_MESSAGING}/congestion.py",
        "last = end.backlog[-1] if end.backlog else None",
        "last = end.backlog[not 1] if end.backlog else None",
    ): "a piece with others behind it is too long to be joined; each piece is then sent as it is",
    (
        f"{_MESSAGING}/destinations.py",
        "if most < ID_COUNT and sum(end.other.peer is remote for end in peer.ends.values()) >= most:",
        "if most != ID_COUNT and sum(end.other.peer is remote for end in peer.ends.values()) >= most:",
    ): "there are never more channels than ids",
    (
        f"{_MESSAGING}/peers.py",
        "lower = range(ID_COUNT // 2 - 1, -1, -1)",
        "lower = range(ID_COUNT // 1 - 1, -1, -1)",
    ): "no id of the upper half is free there",
    (f"{_MESSAGING}/relay.py", "if step == last:", ANY): _ONLY_SPEED,
    (f"{_MESSAGING}/relay.py", "burst = burst * 2 if count == most else FIRST_BURST", ANY): _ONLY_SPEED,
    (
        f"{_MESSAGING}/handshake.py",
        "if not position and (flat := _FLAT.match(buffer)):",
        "if  position and (flat := _FLAT.match(buffer)):",
    ): _ONLY_SPEED,
    (f"{_NOISE}/records.py", "if size <= COPY_LIMIT:", ANY): _ONLY_SPEED,
    (f"{_NOISE}/records.py", "if length <= COPY_LIMIT:", ANY): _ONLY_SPEED,
    (
        f"{_NOISE}/records.py",
        "while position <= last:",
        "while position < last:",
    ): "a header at the very end has no record behind it",
    (f"{_NOISE}/records.py", "self._needed = 0", ANY): _SET_BEFORE,
    (
        f"{_NOISE}/nonces.py",
        "self._seen = 0",
        "self._seen = -1",
    ): "its bits stand for nonces below 1, which are refused",
    (
        f"{_NOISE}/nonces.py",
        "kept = self._seen << above if above < self.size else 0",
        "kept = self._seen << above if above < self.size else 1",
    ): "the bit is set in the next line",
    (f"{_NOISE}/records8.py", "if self.nonce >= MAX_NONCE:", "if self.nonce == MAX_NONCE:"): _AT_MOST,
    (f"{_NOISE}/suite.py", "if num_outputs != 2:", "if num_outputs > 2:"): "the library asks for two or three",
    (f"{_NOISE}/handshake.py", "initiator = True", "initiator = False"): "what is chosen by it is dropped",
    (f"{_RMB}/envelope/cipher.py", "if len(self._shared) >= MAX_KEYS:", "if len(self._shared) == MAX_KEYS:"): _AT_MOST,
    (
        f"{_RMB}/envelope/wire.py",
        "return hashlib.md5(preimage(envelope), usedforsecurity=False).digest()",
        "return hashlib.md5(preimage(envelope), usedforsecurity=True).digest()",
    ): "the digest is the same",
    (
        f"{_RMB}/relay/backlog.py",
        "self._appended = 0",
        "self._appended = 1",
    ): "only the growth of the number matters",
    (
        f"{_RMB}/relay/delivery.py",
        "if self._backlog.messages and not self.catching_up:",
        "if self._backlog.messages or not self.catching_up:",
    ): "the call does nothing then",
    (f"{_RMB}/relay/federation/batch.py", "while at < len(body):", "while at != len(body):"): _AT_MOST,
    (f"{_RMB}/relay/federation/batch.py", "if len(found) >= MAX_BATCH:", "if len(found) == MAX_BATCH:"): _AT_MOST,
    (
        f"{_RMB}/relay/federation/batch.py",
        "if max(len(self._rest), *map(len, lines), 0) > MAX_LINE:",
        "if max(len(self._rest), *map(len, lines), -1) > MAX_LINE:",
    ): "a length is never negative",
    (f"{_RMB}/relay/federation/offers.py", "self.next = 0.0", "self.next = -1.0"): _NO_EARLIER,
    (
        f"{_RMB}/relay/federation/offers.py",
        "offers.delay, offers.next = RETRY_FIRST, 0.0",
        "offers.delay, offers.next = RETRY_FIRST, -1.0",
    ): _NO_EARLIER,
    (
        f"{_RMB}/relay/federation/offers.py",
        "of_session = len(offers.items) if offers is not None else 0",
        "of_session = len(offers.items) if offers is not None else -1",
    ): "the limit is 1 at least",
    (
        f"{_RMB}/relay/federation/offers.py",
        "or of_session >= MAX_OFFERED // SHARE_DIVISOR",
        "or of_session == MAX_OFFERED // SHARE_DIVISOR",
    ): _AT_MOST,
    (
        f"{_RMB}/relay/federation/slots.py",
        "if self._waiting[_Kind.BATCH] and count[_Kind.BATCH] < MAX_BATCHED:",
        "if self._waiting[_Kind.BATCH] and count[_Kind.BATCH] != MAX_BATCHED:",
    ): _AT_MOST,
    (
        f"{_RMB}/relay/presence.py",
        "self._by_count.put(twin, -self.of_twin[twin])",
        "self._by_count.put(twin, ~self.of_twin[twin])",
    ): "the order is the same",
    (
        f"{_RMB}/relay/presence.py",
        "own = 0 if twin is None else self.of_twin[twin]",
        "own = -1 if twin is None else self.of_twin[twin]",
    ): "few sessions are never ended",
    (f"{_RMB}/relay/queue/sqlite.py", "self.total = 0", ANY): _SET_BEFORE,
    (
        f"{_RMB}/relay/queue/sqlite.py",
        "self._waiting.append((deferred, cursor.lastrowid or 0))",
        "self._waiting.append((deferred, cursor.lastrowid or 1))",
    ): "an id is never 0",
    (
        f"{_RMB}/relay/queue/sqlite.py",
        "after = batch[-1].id",
        "after = batch[- 0].id",
    ): "the rest of the batch is read again, and left out again",
    (f"{_RMB}/relay/rules.py", "if len(others) == len(relays):", "if len(others) >= len(relays):"): _AT_MOST,
    (f"{_NET}/websocket/frames.py", "self._want = 0", ANY): _SET_BEFORE,
    (f"{_NET}/websocket/frames.py", "elif length == 127:", "elif length >= 127:"): _AT_MOST,
    (f"{_NET}/websocket/frames.py", "if head > 2:", "if head > 3:"): "a head has 2, 4 or 10 bytes",
    (
        f"{_RMB}/twins/identity.py",
        'data = int(junction).to_bytes(8, "little")',
        'data = int(junction).to_bytes( 9, "little")',
    ): "the rest is filled with zeros",
    (
        f"{_RMB}/twins/identity.py",
        'if self.key_type == "ed25519":',
        'if self.key_type <= "ed25519":',
    ): "of the two kinds, this one comes first",
    (
        f"{_RMB}/twins/identity.py",
        "if len(data) != ACCOUNT_SIZE + 3 or data[0] != SS58_PREFIX or _checksum(data[:-2]) != data[-2:]:",
        "if len(data) != ACCOUNT_SIZE | 3 or data[0] != SS58_PREFIX or _checksum(data[:-2]) != data[-2:]:",
    ): "32 | 3 is 32 + 3",
    (f"{_RMB}/twins/token.py", "if len(parts) > 3:", "if len(parts) != 3:"): _AT_LEAST,
    (
        f"{_RMB}/twins/token.py",
        'return urlsafe_b64decode(part + b"=" * (-len(part) % 4))',
        'return urlsafe_b64decode(part + b"=" * (len(part) % 4))',
    ): "the decoder takes more padding than it needs",
    (
        f"{_STREAMS}/agreement.py",
        "while position < len(data) and data[position] != OPTION_END:",
        "while position < len(data) and data[position] > OPTION_END:",
    ): "no byte is smaller",
    (
        f"{_STREAMS}/agreement.py",
        "elif kind == OPTION_ENDED:",
        "elif kind <= OPTION_ENDED:",
    ): "of the two kinds that are left, this one has the smaller number",
    (
        f"{_STREAMS}/agreement.py",
        "elif value[0] > 1 or OPTION_OPEN in options or OPTION_RESUME in options:",
        "elif value[ -1] > 1 or OPTION_OPEN in options or OPTION_RESUME in options:",
    ): "the value has one byte",
    (
        f"{_V2019}/wire.py",
        "if len(payload) < 2 or len(keys) % PUBKEY_SIZE or len(keys) > MAX_HINTS * PUBKEY_SIZE:",
        "if len(payload) < 2 or len(keys) >> PUBKEY_SIZE or len(keys) > MAX_HINTS * PUBKEY_SIZE:",
    ): "a key that is cut short is refused as a key",
    (f"{_V2019}/relay.py", "if most >= FIRST_BURST:", ANY): _ONLY_SPEED,
    (f"{_V2019}/relay.py", "burst = burst * 2 if count == most else FIRST_BURST", ANY): _ONLY_SPEED,
    (
        f"{_V2019}/relay.py",
        "elif peer.destinations.get(responder, 0) >= self.limits.max_per_pair:",
        "elif peer.destinations.get(responder, -1) >= self.limits.max_per_pair:",
    ): "the limit is 1 at least",
}
"""Reason by file, line as it is, and line as the mutant has it, without white space around them."""


def is_equivalent(file: str, before: str, after: str) -> bool:
    """Tell whether no test can notice this change of a line."""
    return (file, before, after) in EQUIVALENT or (file, before, ANY) in EQUIVALENT
