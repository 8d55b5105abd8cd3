"""Values of ``--store``."""

from __future__ import annotations

from typing import Any

from twisted.internet import reactor
from twisted.internet.defer import maybeDeferred
from twisted.trial.unittest import TestCase

from dmsg.discovery.service.service import Discovery
from dmsg.discovery.service.settings import DiscoverySettings
from dmsg.discovery.store.base import StoreError
from dmsg.discovery.store.opening import open_store
from tests.support import asynchronous


class OpenStoreTests(TestCase):
    """Each value of ``--store`` opens a store or is refused."""

    @asynchronous
    async def test_an_unknown_kind_of_store_is_refused(self) -> None:
        for description in ("", "memory", "memory:x", "sqlite:", "file:x", "redis:", "redis://", "redis://h:x/"):
            try:
                await open_store(description, reactor)
            except StoreError:
                continue
            self.fail(f"{description} was opened")

    @asynchronous
    async def test_only_a_durable_discovery_waits_for_the_disk(self) -> None:
        for durable, synchronous in ((False, 1), (True, 2)):  # The values mean NORMAL and FULL.
            settings = DiscoverySettings(durable=durable)
            listen = ["tcp:0:interface=127.0.0.1"]
            service = Discovery(reactor, listen, f"sqlite:{self.mktemp()}", settings)
            service.startService()
            await service.ready
            store: Any = service._running and service._running.store
            self.assertEqual((synchronous,), store._db.execute("PRAGMA synchronous").fetchone())
            await maybeDeferred(service.stopService)

    @asynchronous
    async def test_a_redis_that_is_not_there(self) -> None:
        import socket

        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        for url, text in (
            (f"redis://127.0.0.1:{port}/0", "Redis does not answer"),
            (f"redis://:secret@127.0.0.1:{port}/0", "DMSG_REDIS_PASSWORD"),
        ):
            try:
                await open_store(url, reactor)
            except StoreError as error:
                self.assertIn(text, str(error))
                self.assertNotIn("secret", str(error))
            else:
                self.fail("opened")
