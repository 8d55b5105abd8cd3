"""Sampling of an entity's numbers every few seconds, and updates for the browsers that show its page."""

from __future__ import annotations

import json
from collections.abc import Callable

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.web.server import Request

from dmsg.net.retry_loop import RetryLoop
from dmsg.pages.history import History, reason_number
from dmsg.pages.model import StatusSource
from dmsg.pages.recent_events import RecentEvents
from dmsg.pages.rendering import Parts, flatten, parts

INTERVAL = 2.0
"""Seconds between samples."""
MAX_WATCHERS = 16
"""Maximum number of browsers that receive updates at the same time."""


class TooManyWatch(Exception):
    """Error: the maximum number of browsers already receives updates."""


class Watcher:
    """Browser that receives each update as a server-sent event.

    A browser that reads too slowly gets no updates until its send queue is empty again (back-pressure).
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._last: dict[str, str] = {}
        self._paused = False
        request.setHeader(b"content-type", b"text/event-stream")
        request.setHeader(b"cache-control", b"no-store")
        request.registerProducer(self, True)
        request.write(b"retry: 2000\n\n")

    def send_changes(self, content: dict[str, str]) -> None:
        """Send the parts of the page that have changed since the last update.

        :param content: HTML of all parts, by name.
        """
        if self._paused:
            return
        changed = {name: text for name, text in content.items() if self._last.get(name) != text}
        self._last.update(changed)
        self._request.write(b"data: " + json.dumps(changed).encode() + b"\n\n")

    def end(self) -> None:
        """End the response, because the entity stops."""
        self._request.unregisterProducer()
        self._request.finish()

    def pauseProducing(self) -> None:
        self._paused = True

    def resumeProducing(self) -> None:
        self._paused = False

    def stopProducing(self) -> None:
        """Do nothing when the connection ends, because ``notifyFinish`` of the request reports the end, too."""


class Sampler:
    """Sampler of one entity, with the history of numbers that its page shows.

    :param wall: clock that returns Unix time.
    """

    def __init__(self, reactor: IReactorTime, source: StatusSource, wall: Callable[[], float]) -> None:
        self.source = source
        self._reactor = reactor
        self._wall = wall
        self.samples = History()
        self.recent_events = RecentEvents()
        self._watchers: dict[Watcher, None] = {}
        self._sample_loop = RetryLoop(reactor, self._sample, lambda failures: INTERVAL, "sampling the status page")

    def start(self) -> None:
        """Take a sample now, and then every :data:`INTERVAL` seconds."""
        self._sample_loop.start()
        self._sample_loop.now()

    def stop(self) -> None:
        """Stop sampling, and end the connections of the browsers."""
        self._sample_loop.stop()
        for one in list(self._watchers):
            self._forget(one)
            one.end()

    async def _sample(self) -> float:
        shown = self.source
        shown.refresh()
        reasons = shown.reasons()
        counted = {reason_number(name): number for name, number in reasons.items() if number}
        self.samples.add(self._reactor.seconds(), shown.numbers(), counted)
        self.recent_events.update(self._wall(), shown.facts(), reasons)
        if self._watchers:
            content = {name: flatten(part) for name, part in (await self.parts()).items()}
            for one in list(self._watchers):
                one.send_changes(content)
        return INTERVAL

    async def parts(self) -> Parts:
        """Return the parts of the page as they are now."""
        tables = await self.source.tables()
        return parts(self.source, self.samples, self.recent_events, tables, self._wall())

    def watch(self, request: Request) -> None:
        """Send updates to a browser from now on.

        :param request: request of the browser, which stays unanswered while updates are sent.
        :raises TooManyWatch: the maximum number of browsers already receives updates.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyWatch
        one = Watcher(request)
        self._watchers[one] = None
        left: Deferred[None] = request.notifyFinish()
        left.addBoth(lambda _: self._forget(one))

    def _forget(self, watcher: Watcher) -> None:
        self._watchers.pop(watcher, None)
