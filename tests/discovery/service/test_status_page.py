"""Status page of a discovery whose process is paused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from dmsg.discovery.service.status_page import STORE_TIMEOUT, DiscoveryStatus
from tests.net.test_own_pauses import PausingClock, pass_time
from tests.support import KEYS


class PauseTests(SynchronousTestCase):
    def test_the_answer_of_the_store(self) -> None:
        async def silent(key: str) -> bytes:
            return await Deferred[bytes]()

        clock = PausingClock()
        api = cast(Any, SimpleNamespace(reports=SimpleNamespace(entry_of=silent)))
        page = DiscoveryStatus(clock, api, cast(Any, None), 0.0)
        searching = Deferred.fromCoroutine(page.search(KEYS["A"].public.text))
        pass_time(clock, 1.0)
        clock.advance(10 * STORE_TIMEOUT)
        pass_time(clock, STORE_TIMEOUT - 1.5)
        self.assertNoResult(searching)
        pass_time(clock, 1.0)
        self.assertIn("does not answer", str(self.successResultOf(searching)))
