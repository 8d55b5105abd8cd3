"""Publisher of a client's entry, which keeps the entry in discovery up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.base.buckets import Bucket
from dmsg.discovery.entries.entry import REFRESH, ClientMeta, Entry, with_feature
from dmsg.discovery.lookup.key_conflict import CONFLICT_TIME, KeyConflict
from dmsg.discovery.lookup.lookups import Lookups, withdraw_in_time
from dmsg.errors import DiscoveryError, DmsgError, EntryNotFound
from dmsg.keys import SecKey
from dmsg.net.retry import retry_delay
from dmsg.net.retry_loop import RetryLoop

PUBLISH_DELAY = 0.05
"""Seconds from a change of the servers to the POST, so that several changes need only one POST."""
FEWER_DELAY = 1.0
"""Seconds from the loss of a server to the POST without it, if other servers are left. Jitter changes the delay by up
to half.
"""
POST_BURST = 5
"""Number of POSTs that may follow each other at short intervals, so that a client that starts or changes its server is
found at once."""
POST_INTERVAL = 5.0
"""Average interval in seconds between further POSTs. Without this limit, a server that accepts connections and closes
them at once could make a client send discovery many requests per second."""
REFRESH_EVERY = 1800.0
"""Seconds after which an unchanged entry is posted again. Discovery drops an entry that was not
posted for two hours.
"""
_log = Logger()


class EntryPublisher:
    """Publisher that posts the entry of ``key`` when it has changed, at intervals, and when discovery has lost it.

    The publisher sends at most ``POST_BURST`` POSTs in a burst, and then one every ``POST_INTERVAL`` seconds. Changes
    in between are posted together, so that the newest list of servers is always posted in the end.

    :param delegated: function that returns the keys of the connected servers in hexadecimal, sorted.
    :param features: features that are added to the entry (True) or removed from it (False).
    :param on_failure: called with the error of a failed POST, which is repeated with a growing delay.
    :param on_warning: called with a warning if another program posts the entry of the same key.
    :ivar published: servers in the last POST; None if there was none, or if it failed.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        lookups: Lookups,
        key: SecKey,
        delegated: Callable[[], tuple[str, ...]],
        on_failure: Callable[[DiscoveryError], None],
        random: Random,
        *,
        features: Mapping[str, bool],
        on_warning: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._reactor = reactor
        self._lookups = lookups
        self._key = key
        self._delegated = delegated
        self._on_failure = on_failure
        self._random = random
        self._features = {**features, REFRESH: True}
        self._on_warning = on_warning
        self._key_conflict = KeyConflict(reactor.seconds)
        self._failures = 0
        self._publishing = RetryLoop(
            reactor, self._publish, lambda failures: retry_delay(failures, random), "publishing the entry"
        )
        self._waiting: list[Deferred[None]] = []
        self._posted_at = 0.0
        self._posts = Bucket(POST_BURST, reactor.seconds())
        self.published: tuple[str, ...] | None = None
        self._is_published = False
        """Whether a discovery may have an entry that this client posted."""

    def start(self) -> None:
        """Start posting; before this, :meth:`soon` has no effect."""
        self._publishing.start()

    @property
    def is_busy(self) -> bool:
        """Whether a request is under way."""
        return self._publishing.busy

    def when_published(self) -> Deferred[None]:
        """Return a Deferred that fires when discovery has stored the client's entry, with all servers to which the
        client is connected, and there is at least one such server."""
        published: Deferred[None] = Deferred()
        if self.published and self.published == self._delegated():
            published.callback(None)
        else:
            self._waiting.append(published)
        return published

    def soon(self, delay: float = PUBLISH_DELAY) -> None:
        """Post within ``delay`` seconds if the entry has changed or discovery has lost it. After ``POST_BURST`` POSTs,
        the POST may be later by up to ``POST_INTERVAL`` seconds."""
        # After a failure the next attempt is already planned, with a growing delay. A change of the entry must not make
        # it earlier, because the clients would flood a failing discovery.
        if not self._failures or not self._publishing.is_planned:
            self._publishing.soon(delay)

    def changed(self) -> None:
        """Post the changed list of servers.

        If a server is lost while others are left, the POST is delayed by about ``FEWER_DELAY``, so that the POST can
        include the replacement. Otherwise all clients of a failed server would post twice at the same time.
        """
        wanted = set(self._delegated())
        only_fewer = bool(wanted) and self.published is not None and wanted < set(self.published)
        self.soon(FEWER_DELAY * self._random.uniform(0.5, 1.5) if only_fewer else PUBLISH_DELAY)

    def publish(self) -> None:
        """Post now, or as soon as the request under way has ended and the limit of POSTs permits it."""
        self._publishing.now()

    async def withdraw(self) -> None:
        """Stop posting, and withdraw the entry if discovery answers in time."""
        self._publishing.stop()
        if self._is_published:
            offered = [feature for feature, said in self._features.items() if said]
            await withdraw_in_time(self._lookups, self._reactor, self._key, "client", offered)
        self.published = None
        self._is_published = False
        self._fire_waiting(Failure(DmsgError("the client is stopped")))

    async def _publish(self) -> float | None:
        wanted = self._delegated()
        unchanged = wanted == self.published or (not wanted and self.published is None)
        if unchanged and not wanted:
            return self._seconds_to_next_check()
        # Looking for an unchanged entry is a request to discovery, too, so it counts like a POST.
        if not self._posts.take(1.0, 1.0 / POST_INTERVAL, POST_BURST, self._reactor.seconds()):
            # The lower bound prevents an endless loop if rounding leaves slightly less than one token.
            return max((1.0 - self._posts.level) * POST_INTERVAL, PUBLISH_DELAY)
        if unchanged and not await self._is_missing(wanted):
            # Callers can be waiting although nothing is posted: the connection to a server was lost during the POST
            # that names the server, and is open again.
            self._fire_if_published()
            return self._seconds_to_next_check()
        # ``withdraw`` may have been called during the request. A POST now would publish the entry again.
        return await self._post(wanted) if self._publishing.is_started else None

    async def _post(self, wanted: tuple[str, ...]) -> float | None:
        """Post the entry with the servers ``wanted``, and return the seconds until the next run."""
        # ``_is_published`` is set before the POST, because discovery may store the entry even if its answer does not
        # arrive.
        self._is_published = True
        error: DiscoveryError | None = None
        try:
            await self._lookups.update(self._key, lambda entry: self._make(entry, wanted))
        except DiscoveryError as failed:
            error = failed
        if not self._publishing.is_started:
            return None  # ``withdraw`` was called while the POST was under way, and is withdrawing the posted entry.
        if error is not None:
            self._failures += 1
            self._on_failure(error)
            self.published = None
            return retry_delay(self._failures, self._random)
        self._failures = 0
        self.published = wanted
        self._posted_at = self._reactor.seconds()
        if wanted != self._delegated():
            return PUBLISH_DELAY  # The servers changed while the POST was under way, so the entry is posted again.
        self._fire_if_published()
        return self._seconds_to_next_check()

    def _fire_if_published(self) -> None:
        """Fire the Deferreds of :meth:`when_published`, if the published servers are still the present ones."""
        if self.published and self.published == self._delegated():
            self._fire_waiting()

    def _fire_waiting(self, result: Failure | None = None) -> None:
        """Fire the Deferreds of :meth:`when_published`, or fail them if ``result`` is a Failure."""
        # The list is emptied first, because a callback may add a Deferred to it.
        waiting, self._waiting = self._waiting, []
        for deferred in waiting:
            if not deferred.called:
                deferred.callback(result)

    def _seconds_to_next_check(self) -> float | None:
        """Return the seconds until the next check whether discovery still has the entry; None without servers. The time
        has jitter, so that clients do not all check at the same time.
        """
        return REFRESH_EVERY * self._random.uniform(1.0, 1.2) if self.published else None

    def _make(self, entry: Entry, delegated: tuple[str, ...]) -> Entry:
        version = entry.version
        for feature, offered in self._features.items():
            version = with_feature(version, feature, offered)
        return replace(entry, version=version, client=ClientMeta(delegated))

    async def _is_missing(self, delegated: tuple[str, ...]) -> bool:
        """Return whether the unchanged entry has to be posted again: because the entry is old, because discovery has
        lost it, or because another program has replaced it.
        """
        try:
            entry = await self._lookups.stored_entry(self._key.public)
        except EntryNotFound:
            return True
        except DiscoveryError:
            return False  # No discovery answers, so a POST would probably fail, too.
        is_said = all(entry.offers(feature) == offered for feature, offered in self._features.items())
        if is_said and entry.client is not None and entry.client.delegated_servers == delegated:
            return bool(self._reactor.seconds() - self._posted_at >= REFRESH_EVERY)
        if not self._lookups.is_posted_here(entry) and entry.client != ClientMeta(delegated):
            given_up = self._key_conflict.note_replaced()
            self._on_warning(
                "another program with the same key has replaced the entry of this program in discovery"
                + (f"; not posted again for {CONFLICT_TIME / 60:.0f} minutes" if given_up else "; posted again")
                + ": stop one of them, or give it a key of its own"
            )
            return not given_up
        return True
