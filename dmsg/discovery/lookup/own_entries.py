"""Changes of this program's entries in one discovery: posts, updates, deletions and withdrawals.

An update replaces the present entry of a key by the next one. Several programs may use the same key, so each change is
made again if another program has posted meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from twisted.logger import Logger

from dmsg.base.units import human_time
from dmsg.discovery.entries.entry import VERSION, ClientMeta, Entry, ServerMeta, Successor, with_feature
from dmsg.discovery.entries.gojson import INT64
from dmsg.discovery.entries.rules import WRONG_TIME, Deletion, decode_deletion, next_sequence
from dmsg.discovery.lookup.requests import DiscoveryRequests
from dmsg.errors import DiscoveryError, EntryError, EntryNotFound
from dmsg.keys import PubKey, SecKey
from dmsg.net.web.response import parse_json

UPDATE_ATTEMPTS = 4
"""Maximum number of attempts at a change of an entry. An attempt fails if another program posts an entry of the same
key in the meantime.
"""
_REFUSED = (400, 401)
"""HTTP status codes of a discovery that does not accept the form in which an entry was signed."""

_log = Logger()


class _Deleted(DiscoveryError):
    """Error: the posted entry is dated before the deletion of an earlier entry of its key.

    :ivar timestamp: date of the deletion, in nanoseconds since 1970. The key's owner has signed the deletion, so nobody
        else can have forged the date.
    """

    def __init__(self, text: str, timestamp: int) -> None:
        super().__init__(text, 422)
        self.timestamp = timestamp


class OwnEntries:
    """Entries of this program in one discovery.

    :param date: returns the date for new entries and deletions, in nanoseconds since 1970.
    """

    def __init__(self, requests: DiscoveryRequests, date: Callable[[], int]) -> None:
        self._requests = requests
        self._date = date
        self._port_signed = True
        """Whether this client signs servers' entries with the field ``port``. The value changes if discovery accepts
        only the other form.
        """
        self._posted_entries: dict[PubKey, Entry] = {}
        """Last entry that :meth:`update` posted, by key."""
        self._sent_entries: dict[PubKey, Entry] = {}
        """Last entry that :meth:`update` sent, by key. Discovery may have stored it although no answer arrived."""

    def includes(self, entry: Entry) -> bool:
        """Whether ``entry`` is the last entry of its key that :meth:`update` posted, or the last one that it sent."""
        return any(ours.signature == entry.signature for ours in self._own_entries(entry.key))

    def _own_entries(self, key: PubKey) -> list[Entry]:
        """Return the last entry of a key that :meth:`update` posted, and the last one that it sent."""
        return [table[key] for table in (self._posted_entries, self._sent_entries) if key in table]

    def _forget_own(self, key: PubKey) -> None:
        """Forget the entries of a key that :meth:`update` posted or sent, because discovery has none of them."""
        self._posted_entries.pop(key, None)
        self._sent_entries.pop(key, None)

    async def post(self, entry: Entry) -> None:
        """Post a signed entry; see ``Lookup.post``."""
        status, body = await self._requests.request("POST", "/discovery/entries", entry.to_json())
        if status == 200:
            return
        error = self._requests.error(status, body)
        deletion = _deletion_in(body, entry) if status == 422 else None
        raise error if deletion is None else _Deleted(str(error), deletion.timestamp)

    async def update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Entry:
        """Replace the entry of ``key`` by its next entry, and return it; see ``Lookup.update``."""
        attempts = 0
        refused: DiscoveryError | None = None
        deleted = 0
        """Date of the deletion of an earlier entry of the key, in nanoseconds since 1970; 0 if unknown."""
        # The first attempt is based on the last entry that this client posted, which saves a request for the present
        # entry. If another program has posted since then, the POST fails, and the next attempt fetches the entry.
        trusts = key.public in self._posted_entries
        while True:
            client: ClientMeta | None = None
            server: ServerMeta | None = None
            version = VERSION
            successor: Successor | None = None
            sequence, timestamp = 0, deleted and deleted + 1
            try:
                present = self._posted_entries[key.public] if trusts else await self._requests.entry(key.public)
            except EntryNotFound:
                pass
            else:
                version, client, server = present.version, present.client, present.server
                successor = present.successor
                sequence, timestamp = next_sequence(present.sequence), present.timestamp + 1
            blank = Entry(
                version, sequence, max(self._date(), timestamp), key.public.hex(), client, server, successor=successor
            )
            entry = self._in_form(make(blank)).sign(key)
            self._sent_entries[key.public] = entry
            try:
                await self.post(entry)
            except DiscoveryError as error:
                if trusts and error.status in (*_REFUSED, 422):
                    trusts = False
                    continue
                if refused is not None and error.status in _REFUSED:
                    self._port_signed = not self._port_signed
                    raise refused from None
                if error.status in _REFUSED and entry.server is not None and refused is None:
                    # A discovery that follows the seed document verifies a server's signature without ``port``. So the
                    # entry is posted once more in the other form.
                    self._port_signed = not self._port_signed
                    refused = error
                    continue
                # Status 422 means that another program has meanwhile posted or deleted an entry of this key, so the
                # loop tries again.
                attempts += 1
                if error.status != 422 or attempts == UPDATE_ATTEMPTS:
                    raise self._with_clock(error, entry) from None
                if isinstance(error, _Deleted) and entry.timestamp <= error.timestamp < INT64 - 1:
                    self._tell_of_clock(entry, error.timestamp)
                    deleted = error.timestamp
            else:
                if refused is not None:
                    form = "with" if self._port_signed else "without"
                    _log.info(
                        "{url} accepts servers' entries {with_or_without} the field 'port'",
                        url=self._requests.shown_url,
                        with_or_without=form,
                    )
                self._posted_entries[key.public] = entry
                return entry

    def _tell_of_clock(self, entry: Entry, deleted: int) -> None:
        _log.warn(
            "{url}: an entry of {key} was deleted by a machine whose clock was {much} ahead of this machine's, and the "
            "new entry is dated after the deletion; is the clock of this machine right?",
            url=self._requests.shown_url,
            key=entry.key.short,
            much=human_time(round((deleted - entry.timestamp) / 1e9)),
        )

    @staticmethod
    def _with_clock(error: DiscoveryError, entry: Entry) -> DiscoveryError:
        """Return ``error`` with advice about clocks, if an earlier version of discovery refused a key's first entry
        because of its date. Such a version requires that the entry is newer than the deletion of the key's previous
        entry, but does not report the date of the deletion.
        """
        if entry.sequence or isinstance(error, _Deleted) or WRONG_TIME not in str(error):
            return error
        why = "an entry of this key was deleted by a clock that was ahead; is the clock of this machine right?"
        return DiscoveryError(f"{error}: {why} Discovery forgets the deletion after a day", error.status)

    def _in_form(self, entry: Entry) -> Entry:
        """Return ``entry`` in the form that this discovery accepts: a server's entry with or without ``port``."""
        if self._port_signed or entry.server is None:
            return entry
        return replace(entry, server=replace(entry.server, port=None))

    async def delete(self, key: SecKey) -> None:
        """Delete the entry of ``key``; see ``Lookup.delete``."""
        present = await self._requests.entry(key.public)
        deletion = Deletion(present.static, present.sequence, max(self._date(), present.timestamp + 1)).sign(key)
        status, body = await self._requests.request("DELETE", f"/discovery/entries/{key.public}", deletion.to_json())
        if status == 404:
            raise EntryNotFound(
                f"discovery {self._requests.shown_url} has no entry of {key.public.short}", key.public.hex()
            )
        if status != 200:
            raise self._requests.error(status, body)
        self._forget_own(key.public)

    async def withdraw(self, key: SecKey, half: str, features: frozenset[str]) -> bool:
        """Withdraw one half of an entry; see ``Lookup.withdraw``."""
        for attempt in range(1, UPDATE_ATTEMPTS + 1):
            present = await self._requests.entry(key.public)
            if not self._is_ours(present, half):
                return False
            other = present.client if half == "server" else present.server
            try:
                if other is None:
                    await self._delete_or_empty(key, present)
                else:
                    await self.post(self._without_half(present, half, features).sign(key))
            except DiscoveryError as error:
                # Status 422 means that a program has posted meanwhile, so the loop checks again whose entry it is.
                if error.status != 422 or attempt == UPDATE_ATTEMPTS:
                    raise
            else:
                self._forget_own(key.public)
                return True
        raise AssertionError("unreachable")

    def _is_ours(self, present: Entry, half: str) -> bool:
        return any(self._has_half(present, ours, half) for ours in self._own_entries(present.key))

    @staticmethod
    def _has_half(present: Entry, posted: Entry, half: str) -> bool:
        """Whether the entry in discovery has the half of an entry that this program has posted."""
        if posted.signature == present.signature:
            return True
        # Another program has posted this entry, but it may contain the half that this program has posted. A client and
        # a server with the same key each copy the other's half when they post.
        if half == "client":
            return present.server is not None and present.client == posted.client
        shared = present.client is not None and present.server is not None and posted.server is not None
        return shared and present.server.address == posted.server.address  # type: ignore[union-attr]

    def _without_half(self, present: Entry, half: str, features: frozenset[str]) -> Entry:
        version = present.version
        for feature in features:
            version = with_feature(version, feature, present=False)
        left = replace(
            present,
            version=version,
            sequence=next_sequence(present.sequence),
            timestamp=max(self._date(), present.timestamp + 1),
            client=None if half == "client" else present.client,
            server=None if half == "server" else present.server,
        )
        return self._in_form(left)

    async def _delete_or_empty(self, key: SecKey, present: Entry) -> None:
        """Delete an entry. If this discovery does not support deletion, post an entry without servers and without free
        connections in its place.
        """
        try:
            await self.delete(key)
        except DiscoveryError as error:
            if error.status not in (405, 501):
                raise
            empty = replace(
                present,
                sequence=next_sequence(present.sequence),
                timestamp=max(self._date(), present.timestamp + 1),
                client=None if present.client is None else ClientMeta(()),
                server=None if present.server is None else replace(present.server, available_connections=0),
            )
            await self.post(self._in_form(empty).sign(key))


def _deletion_in(body: bytes, entry: Entry) -> Deletion | None:
    """Return the deletion that an answer contains, if the key of ``entry`` has signed it."""
    try:
        deletion = decode_deletion(json.dumps(parse_json(body)["deletion"]).encode())
    except (ValueError, KeyError, TypeError, EntryError):
        return None
    return deletion if deletion.static == entry.static else None
