"""Client of several discoveries of one network. It returns the newest entry, and does not wait for discoveries that
hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import CancelledError, Deferred, DeferredList, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.discovery.entries.entry import Entry
from dmsg.discovery.lookup.lookup import Lookup
from dmsg.discovery.lookup.server_list import ServerList
from dmsg.errors import DiscoveryError, DmsgError, EntryNotFound, WrongDiscovery
from dmsg.keys import PubKey, SecKey
from dmsg.net.deadlines import no_answer
from dmsg.net.own_pauses import FairTimeout, stop_timeout

T = TypeVar("T")
_log = Logger()

GRACE = 1.0
"""Seconds to wait for the other discoveries after the first success, because another one may have a newer entry."""
HUNG_FOR = 60.0
"""Seconds during which the client does not wait for a discovery that has not answered in time. Requests are still sent
to that discovery.
"""
STOP_TIMEOUT = 2.0
"""Seconds to wait for each answer of discovery when a client or server stops."""


class Lookups:
    """Client of several discoveries of the same network."""

    def __init__(self, lookups: Sequence[Lookup]) -> None:
        if not lookups:
            raise ValueError("at least one discovery is needed")
        self.lookups = tuple(lookups)
        self._hung: dict[Lookup, float] = {}
        self._changing: dict[tuple[Lookup, PubKey], Deferred[Any]] = {}
        """Unfinished changes of entries, by discovery and key."""

    def __str__(self) -> str:
        return "discovery " + ", ".join(lookup.shown_url for lookup in self.lookups)

    def entry(self, key: PubKey) -> Deferred[Entry]:
        """Fetch the entry of ``key`` from all discoveries, and return the newest one; see :meth:`Lookup.entry`."""
        return Deferred.fromCoroutine(self._fetch_newest(lambda lookup: lookup.entry(key)))

    def stored_entry(self, key: PubKey) -> Deferred[Entry]:
        """Fetch the newest entry of ``key``, like :meth:`entry`.

        If no discovery returns an entry, and at least one answers that it has none, this fails with
        :class:`~dmsg.errors.EntryNotFound`, even if other discoveries cannot be reached. The owner of the key can then
        post its entry to the discovery that answered.
        """
        return Deferred.fromCoroutine(self._fetch_newest(lambda lookup: lookup.entry(key), is_owner=True))

    def available_servers(self) -> Deferred[ServerList]:
        """Fetch the servers from all discoveries that answer, each once; see :meth:`Lookup.available_servers`."""
        return Deferred.fromCoroutine(self._available_servers())

    def update(self, key: SecKey, make: Callable[[Entry], Entry]) -> Deferred[None]:
        """Update the entry at every discovery, see :meth:`Lookup.update`; fails if all of them fail.

        The Deferred fires ``GRACE`` seconds after the first success, or when all discoveries have answered. Slower
        updates continue after that; the next change of the same key cancels them.
        """
        return Deferred.fromCoroutine(self._change_everywhere(key.public, lambda lookup: lookup.update(key, make)))

    def delete(self, key: SecKey) -> Deferred[None]:
        """Delete the entry at every discovery, see :meth:`Lookup.delete`; fails if all of them fail."""
        return Deferred.fromCoroutine(self._change_everywhere(key.public, lambda lookup: lookup.delete(key)))

    def withdraw(self, key: SecKey, half: str, features: Iterable[str] = ()) -> Deferred[None]:
        """Withdraw the entry at every discovery, see :meth:`Lookup.withdraw`; fails if all of them fail.

        If an update of the same key is under way, the withdrawal waits for the end of the update, up to ``GRACE``
        seconds.
        """
        marks = tuple(features)
        return Deferred.fromCoroutine(
            self._change_everywhere(key.public, lambda lookup: lookup.withdraw(key, half, marks), waits=True)
        )

    def is_posted_here(self, entry: Entry) -> bool:
        """Whether ``entry`` is the last entry of its key that :meth:`update` posted to one of the discoveries."""
        return any(lookup.is_posted_here(entry) for lookup in self.lookups)

    def close(self) -> Deferred[None]:
        """Cancel all unfinished updates, deletions and withdrawals of entries, and close the pooled connections."""
        for changing in list(self._changing.values()):
            changing.cancel()
        return DeferredList([lookup.close() for lookup in self.lookups]).addCallback(lambda _: None)

    async def _gather(self, ask: Callable[[Lookup], Deferred[T]], *, leave: bool = False) -> list[T | Failure]:
        """Send a request to all discoveries. Return the answers and failures of those that answer in time.

        After the first success the other discoveries have ``GRACE`` seconds left. A discovery that recently failed to
        answer in time is not waited for at all.

        :param leave: whether late requests continue in the background; otherwise they are cancelled.
        """
        askings = [ask(lookup) for lookup in self.lookups]
        results: dict[int, T | Failure] = {}
        done: Deferred[None] = Deferred()
        over = left = False
        timer: FairTimeout | None = None
        reactor = self.lookups[0].reactor
        now = reactor.seconds()
        hung = {number for number, lookup in enumerate(self.lookups) if self._hung.get(lookup, now) > now}

        def look(result: T | Failure, number: int) -> None:
            nonlocal timer
            if over:
                if left and isinstance(result, Failure) and not result.check(CancelledError):
                    _log.info(
                        "discovery {url} failed after another discovery had answered: {error}",
                        url=self.lookups[number].shown_url,
                        error=str(result.value),
                    )
                return
            results[number] = result
            good = not all(isinstance(one, Failure) for one in results.values())
            missing = set(range(len(askings))) - results.keys()
            if not missing or (good and missing <= hung):
                finish()
            elif good and timer is None:
                timer = FairTimeout(reactor, GRACE, finish)

        def finish() -> None:
            nonlocal over
            over = True
            done.callback(None)

        for number, asking in enumerate(askings):
            asking.addBoth(look, number)
        try:
            await done
            left = leave
        finally:
            # If this coroutine was cancelled, ``done`` has fired already. With the flag ``over`` set, the cancellations
            # below do not fire it a second time.
            over = True
            stop_timeout(timer)
            for number, lookup in enumerate(self.lookups):
                if number not in results:
                    self._hung[lookup] = reactor.seconds() + HUNG_FOR
                    if not left:
                        askings[number].cancel()
                elif number not in hung:
                    self._hung.pop(lookup, None)
        return [results[number] for number in sorted(results)]

    async def _fetch_newest(self, ask: Callable[[Lookup], Deferred[Entry]], *, is_owner: bool = False) -> Entry:
        if len(self.lookups) == 1:
            return await ask(self.lookups[0])
        answers = await self._gather(ask)
        entries = [one for one in answers if not isinstance(one, Failure)]
        if entries:
            # The newest entry is used. The owner of the key has signed it, so a discovery that returns an older one is
            # outdated or withholds the newer one.
            return max(entries, key=lambda entry: entry.timestamp)
        failures = [one for one in answers if isinstance(one, Failure)]
        missing = next((one.value for one in failures if isinstance(one.value, EntryNotFound)), None)
        if is_owner and missing is not None:
            raise missing
        # Any other error is preferred to EntryNotFound, because a discovery that failed may have the entry.
        raise _strongest(failures, EntryNotFound)

    async def _change_everywhere(
        self, key: PubKey, ask: Callable[[Lookup], Deferred[T]], *, waits: bool = False
    ) -> None:
        """Change the entry of a key at every discovery.

        :param ask: sends the change to one discovery.
        :param waits: whether to wait for the end of an earlier change, instead of cancelling it.
        """

        def change(lookup: Lookup) -> Deferred[T]:
            place = lookup, key
            before = self._changing.pop(place, None)
            if before is not None and waits:
                asking = Deferred.fromCoroutine(_send_request_after(lookup.reactor, before, lambda: ask(lookup)))
            else:
                if before is not None:
                    before.cancel()  # The earlier change is cancelled, because the new one replaces it.
                asking = ask(lookup)
            changing = self._changing[place] = asking

            def ended(result: T | Failure) -> T | Failure:
                if self._changing.get(place) is changing:
                    del self._changing[place]
                return result

            return changing.addBoth(ended)

        results = await self._gather(change, leave=True)
        failures = [result for result in results if isinstance(result, Failure)]
        if len(failures) == len(results):
            if failures[0].check(CancelledError):
                raise DiscoveryError("this change of the entry was cancelled, because a later change replaces it")
            raise _strongest(failures, WrongDiscovery)

    async def _available_servers(self) -> ServerList:
        answers = await self._gather(lambda lookup: lookup.available_servers())
        found: dict[str, Entry] = {}
        for answer in answers:
            for entry in () if isinstance(answer, Failure) else answer:
                known = found.get(entry.static)
                if known is None or known.timestamp < entry.timestamp:
                    found[entry.static] = entry
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        if not found and len(failures) == len(answers):
            # Any other error is preferred to WrongDiscovery, after which callers give up: an unreachable discovery may
            # recover.
            raise _strongest(failures, WrongDiscovery)
        refusals = [one.refusal for one in answers if not isinstance(one, Failure) and one.refusal]
        return ServerList(found.values(), "; ".join(refusals))


async def _send_request_after(reactor: IReactorTime, earlier: Deferred[Any], send: Callable[[], Deferred[T]]) -> T:
    """Send a request after the end of an earlier one, which is cancelled if it takes longer than ``GRACE`` seconds."""
    # A cancelled POST may still be on its way to discovery, which would store the entry after its withdrawal.
    ended: Deferred[None] = Deferred()

    def over(result: T) -> T:
        if not ended.called:
            ended.callback(None)
        return result

    earlier.addBoth(over)
    try:
        await ended.addTimeout(GRACE, reactor, no_answer)
    except TimeoutError:
        earlier.cancel()
    return await send()


def _strongest(failures: Iterable[Failure], weak: type[Exception]) -> BaseException:
    """Return the first error that is not of type ``weak``; if all are, the first one."""
    errors = [failure.value for failure in failures if failure.value is not None]
    return next((error for error in errors if not isinstance(error, weak)), errors[0])


async def withdraw_in_time(
    lookups: Lookups, reactor: IReactorTime, key: SecKey, half: str, features: Iterable[str]
) -> None:
    """Withdraw the entry of a client or server that stops, if discovery answers within ``STOP_TIMEOUT`` seconds; see
    :meth:`Lookups.withdraw`."""
    try:
        await lookups.withdraw(key, half, features).addTimeout(STOP_TIMEOUT, reactor, no_answer)
    except (DmsgError, TimeoutError) as error:
        _log.info("the entry could not be deleted from discovery: {error}", error=str(error))
