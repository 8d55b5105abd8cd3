"""Registry entity, and the function that opens a registry by its description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.base.options import (
    Text,
    burst_option,
    checked_by,
    proxied_option,
    rate_option,
)
from dmsg.base.urls import check_url
from dmsg.net.listening import ListeningService
from dmsg.net.reactor import Reactor
from dmsg.net.web.guard import GuardedFactory
from dmsg.net.web.site import Requesters, gated_site
from dmsg.rmb.errors import RegistryUnavailable
from dmsg.rmb.registry.api import MAX_BODY, RegistryAPI
from dmsg.rmb.registry.client import HTTPRegistry
from dmsg.rmb.registry.file import FileRegistry
from dmsg.rmb.registry.interface import TwinRegistry
from dmsg.rmb.registry.table import TableRegistry
from dmsg.rmb.registry.tfchain import TfchainRegistry, node_url

_log = Logger()


def check_registry(description: str) -> str:
    """Check a value of ``--registry`` without opening the registry.

    :raises RegistryUnavailable: the value is not a valid description of a registry.
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
    elif kind in ("ws", "wss"):
        shown = description[:80]
        raise RegistryUnavailable(f"{shown} is not a registry; for a node of tfchain write tfchain:{shown}")
    elif kind != "file" or not rest:
        raise RegistryUnavailable(
            f"{description[:80]!r} is not a registry: http://HOST:PORT, file:PATH or tfchain:wss://HOST:PORT"
        )
    return description


REGISTRY = Text("registry", checked_by(check_registry))


def open_registry(description: str, reactor: IReactorTime) -> TwinRegistry:
    """Open the registry that a value of ``--registry`` describes.

    :param description: ``file:PATH``, ``http://HOST:PORT``, ``https://...``, or ``tfchain:wss://HOST[:PORT]``. The last
        is read only.
    :raises RegistryUnavailable: the description is invalid, or the registry cannot be opened.
    """
    kind, _, rest = check_registry(description).partition(":")
    if kind == "file":
        return FileRegistry(rest, reactor)
    if kind == "tfchain":
        return TfchainRegistry(reactor, rest)
    return HTTPRegistry(reactor, description)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """Settings of a registry service."""

    rate: float = rate_option(50.0)
    burst: float = burst_option(200.0)
    proxied: bool = proxied_option()


DEFAULTS = RegistrySettings()


class RegistryService(ListeningService):
    """Registry entity: a table of twins, its HTTP API, and the ports on which it listens.

    :param listen: Twisted endpoint strings.
    :param store: path of the SQLite file, or ``:memory:``.
    :ivar ready: Deferred that fires with the listening ports.
    """

    name = "rmb-registry"
    listens_as = "registry"

    def __init__(
        self,
        reactor: Reactor,
        listen: Sequence[str],
        store: str,
        settings: RegistrySettings = DEFAULTS,
    ) -> None:
        super().__init__(reactor, listen)
        self._store = store
        self._settings = settings
        self._table: TableRegistry | None = None
        self._api: RegistryAPI | None = None
        self._guarded: GuardedFactory | None = None

    async def _start(self) -> None:
        self._table = TableRegistry(self._store)
        self._api = api = RegistryAPI(self._reactor, self._table)
        site = gated_site(
            api.resource(),
            self._reactor,
            api.count_refusal,
            Requesters(self._reactor, self._settings.rate, self._settings.burst, proxied=self._settings.proxied),
            max_body=MAX_BODY,
        )
        self._guarded = GuardedFactory(
            site, self._reactor, by_place=not self._settings.proxied, on_refused=api.count_refusal
        )
        await self._listen(self._guarded)

    async def _stop(self) -> None:
        await self._stop_listening()
        if self._api is not None:
            self._api.close()
        if self._guarded is not None:
            self._guarded.guard.drop_all()
        if self._table is not None:
            await self._table.close()
            self._table = None
