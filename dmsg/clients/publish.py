"""Keeping a client's entry in discovery true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from twisted.internet.defer import Deferred, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.discovery.entries.entry import REFRESH, ClientMeta, Entry, with_feature
from dmsg.discovery.lookup.key_conflict import CONTESTED_TIME, Contest
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.errors import DiscoveryError, DmsgError, EntryNotFound
from dmsg.keys import SecKey
from dmsg.net.retry import retry_delay
from dmsg.net.retry_loop import RetryLoop

PUBLISH_DELAY = 0.05
"""Seconds in which changes of the server list are collected into one POST."""
FEWER_DELAY = 1.0
"""Seconds, and by chance up to half more or less, before it is said that a server is gone, while there are others."""
WITHDRAW_TIMEOUT = 2.0
"""Seconds that stopping waits for discovery."""
REFRESH_EVERY = 1800.0
"""Seconds after which an entry is posted again that has not changed: discovery drops it after two hours."""
_log = Logger()


class EntryPublisher:
    """Posts the entry of ``key`` whenever its servers changed, and again what discovery has lost.

    :param delegated: says the servers as they are now, as hexadecimal keys in order.
    :param features: what the entry says that this client offers, or does not.
    :param failed: told why a POST failed; it is tried again with a growing delay.
    :param warned: told that another program posts the entry of the same key.
    :ivar published: the servers that discovery was last told; None before the first time.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        lookups: Lookups,
        key: SecKey,
        delegated: Callable[[], tuple[str, ...]],
        failed: Callable[[DiscoveryError], None],
        random: Random,
        *,
        features: Mapping[str, bool],
        warned: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._reactor = reactor
        self._lookups = lookups
        self._key = key
        self._delegated = delegated
        self._failed = failed
        self._random = random
        self._features = {**features, REFRESH: True}
        self._warned = warned
        self._contest = Contest(reactor.seconds)
        self._failures = 0
        self._again = RetryLoop(
            reactor, self._publish, lambda failures: retry_delay(failures, random), "publishing the entry"
        )
        self._waiting: list[Deferred[None]] = []
        self._posted_at = 0.0
        self.published: tuple[str, ...] | None = None
        self._told = False
        """Some discovery may have an entry of this client."""

    def start(self) -> None:
        """From now on :meth:`soon` has an effect."""
        self._again.start()

    @property
    def busy(self) -> bool:
        """A request is under way."""
        return self._again.busy

    def when_published(self) -> Deferred[None]:
        """Fires when discovery has the servers as they are, and there is one."""
        published: Deferred[None] = Deferred()
        if self.published and self.published == self._delegated():
            published.callback(None)
        else:
            self._waiting.append(published)
        return published

    def soon(self, delay: float = PUBLISH_DELAY) -> None:
        """Something changed, or it is time to look whether the entry is still there."""
        # after a failure the delay grows; a change does not cut it short
        if not self._failures or not self._again.planned:
            self._again.soon(delay)

    def changed(self) -> None:
        """The servers are others now.

        One that is gone while others are there waits for the one that takes its place: a client of a server that dies
        would post twice, with all the others of that server.
        """
        wanted = set(self._delegated())
        only_fewer = bool(wanted) and self.published is not None and wanted < set(self.published)
        self.soon(FEWER_DELAY * self._random.uniform(0.5, 1.5) if only_fewer else PUBLISH_DELAY)

    def publish(self) -> None:
        """Do it now, or right after what is under way."""
        self._again.now()

    async def withdraw(self) -> None:
        """The client stops: delete the entry, if discovery answers in time."""
        self._again.stop()
        if self._told:
            try:
                offered = [feature for feature, said in self._features.items() if said]
                withdrawn = self._lookups.withdraw(self._key, "client", offered)
                await withdrawn.addTimeout(WITHDRAW_TIMEOUT, self._reactor)
            except (DmsgError, TimeoutError) as error:
                _log.info("entry was not withdrawn: {error}", error=str(error))
        self.published = None
        self._told = False
        waiting, self._waiting = self._waiting, []
        for deferred in waiting:
            if not deferred.called:
                deferred.errback(DmsgError("client is stopped"))

    async def _publish(self) -> float | None:
        wanted = self._delegated()
        unchanged = wanted == self.published or (not wanted and self.published is None)
        if unchanged and (not wanted or not await self._is_missing(wanted)):
            return self._next_look()
        self._told = True
        try:
            await self._lookups.update(self._key, lambda entry: self._make(entry, wanted))
        except DiscoveryError as error:
            self._failures += 1
            self._failed(error)
            self.published = None
            return retry_delay(self._failures, self._random)
        self._failures = 0
        self.published = wanted
        self._posted_at = self._reactor.seconds()
        if wanted != self._delegated():
            return PUBLISH_DELAY
        if wanted:
            waiting, self._waiting = self._waiting, []
            for deferred in waiting:
                if not deferred.called:
                    deferred.callback(None)
        return self._next_look()

    def _next_look(self) -> float | None:
        """Seconds until the entry is posted again, not all clients at a time; none for one that has no servers."""
        return REFRESH_EVERY * self._random.uniform(1.0, 1.2) if self.published else None

    def _make(self, entry: Entry, wanted: tuple[str, ...]) -> Entry:
        version = entry.version
        for feature, offered in self._features.items():
            version = with_feature(version, feature, offered)
        return replace(entry, version=version, client=ClientMeta(wanted))

    async def _is_missing(self, wanted: tuple[str, ...]) -> bool:
        """Whether to post again what was posted: discovery may have lost its store, another program may have posted."""
        try:
            entry = await self._lookups.entry(self._key.public)
        except EntryNotFound:
            return True
        except DiscoveryError:
            return False  # away: nothing to be done now
        is_said = all(entry.offers(feature) == offered for feature, offered in self._features.items())
        if is_said and entry.client is not None and entry.client.delegated_servers == wanted:
            return bool(self._reactor.seconds() - self._posted_at >= REFRESH_EVERY)
        if not self._lookups.is_posted_here(entry) and entry.client != ClientMeta(wanted):
            given_up = self._contest.lost()
            self._warned(
                "another program with the same key has replaced its entry in discovery"
                + (f"; not posted again for {CONTESTED_TIME / 60:.0f} minutes" if given_up else "; posted again")
                + ": stop one of them, or give it a key of its own"
            )
            return not given_up
        return True
