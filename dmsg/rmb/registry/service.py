"""The registry entity, and opening a registry from what an option says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList, maybeDeferred
from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IListeningPort
from twisted.logger import Logger

from dmsg.discovery.lookup import check_url
from dmsg.net.socketopts import tune_listening
from dmsg.net.web.guard import GuardedFactory
from dmsg.net.web.site import gated_site
from dmsg.rmb.errors import RegistryUnavailable
from dmsg.rmb.registry.api import MAX_BODY, RegistryAPI
from dmsg.rmb.registry.client import HTTPRegistry
from dmsg.rmb.registry.file import FileRegistry
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.registry.tfchain import TfchainRegistry, node_url

RATE = 50.0
"""Requests a second and address, by default."""
BURST = 200.0
"""Requests of an address at once, by default."""

_log = Logger()


def check_registry(description: str) -> str:
    """See whether ``--registry`` can be one, without opening it.

    :raises RegistryUnavailable: it cannot.
    """
    kind, _, rest = description.partition(":")
    if kind in ("http", "https"):
        try:
            return check_url(description)
        except ValueError as error:
            raise RegistryUnavailable(str(error)) from None
    if kind == "tfchain":
        try:
            check_url(node_url(rest))
        except ValueError as error:
            raise RegistryUnavailable(str(error)) from None
    elif kind != "file" or not rest:
        raise RegistryUnavailable(f"{description[:80]!r} is no registry: file:PATH or http://HOST:PORT")
    return description


def open_registry(description: str, reactor: Any) -> Any:
    """A registry from what ``--registry`` says.

    :param description: ``file:PATH``, ``http://HOST:PORT`` or ``https://...``,
        or ``tfchain:wss://HOST[:PORT]``, which is read only.
    :raises RegistryUnavailable: unknown, or it cannot be opened.
    """
    kind, _, rest = check_registry(description).partition(":")
    if kind == "file":
        return FileRegistry(rest, reactor)
    if kind == "tfchain":
        return TfchainRegistry(reactor, rest)
    return HTTPRegistry(reactor, description)


class RegistryService(Service):
    """A table of twins, the API over it, and ports that listen.

    :param listen: Twisted endpoint strings.
    :param store: path of the SQLite file, or ``:memory:``.
    :ivar ready: fires with the listening ports.
    """

    name = "rmb-registry"

    def __init__(
        self,
        reactor: Any,
        listen: Sequence[str],
        store: str,
        *,
        rate: float = RATE,
        burst: float = BURST,
        proxied: bool = False,
    ) -> None:
        self._reactor = reactor
        self._listen = tuple(listen)
        self._store = store
        self._rate, self._burst, self._proxied = rate, burst, proxied
        self._table: TableRegistry | None = None
        self._api: RegistryAPI | None = None
        self.ports: list[IListeningPort] = []
        self.ready: Deferred[list[IListeningPort]] = Deferred()

    def startService(self) -> None:
        super().startService()  # type: ignore[no-untyped-call]
        self.ready = Deferred.fromCoroutine(self._start())

    async def _start(self) -> list[IListeningPort]:
        self._table = TableRegistry(self._store)
        self._api = api = RegistryAPI(self._reactor, self._table)
        site = gated_site(
            api.resource(),
            self._reactor,
            api.count_refusal,
            rate=self._rate,
            burst=self._burst,
            proxied=self._proxied,
            max_body=MAX_BODY,
        )
        guarded = GuardedFactory(site, self._reactor, by_place=not self._proxied, refused=api.count_refusal)
        for description in self._listen:
            port = await serverFromString(self._reactor, description).listen(guarded)
            tune_listening(port)
            self.ports.append(port)
            _log.info("registry listens on {address}", address=str(port.getHost()))
        return self.ports

    def stopService(self) -> Deferred[None]:
        super().stopService()  # type: ignore[no-untyped-call]
        return Deferred.fromCoroutine(self._stop())

    async def _stop(self) -> None:
        self.ready.addErrback(lambda _: None)
        await DeferredList([maybeDeferred(port.stopListening) for port in self.ports], consumeErrors=True)
        self.ports.clear()
        if self._api is not None:
            self._api.close()
        if self._table is not None:
            await self._table.close()
            self._table = None
