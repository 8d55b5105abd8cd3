"""Plugin ``twistd rmb-registry``: its options, and its service."""

from __future__ import annotations

from twisted.application.service import IService

from dmsg.base.options import STORAGE, Option, Text, rows_of
from dmsg.errors import needs_extra
from dmsg.net.reactor import Reactor
from dmsg.tap.options import LOG_FORMAT, EntityOptions, listen_row
from dmsg.tap.running import StopOnFailure

try:
    from dmsg.rmb.registry.service import RegistryService, RegistrySettings
except ModuleNotFoundError as error:
    raise SystemExit(f"rmb-registry: {error}; {needs_extra('rmb')}") from None


def _path(store: str) -> str:
    """Return the path that SQLite gets for a store: a file, or ``:memory:``."""
    kind, colon, rest = store.partition(":")
    if not colon or kind not in ("memory", "sqlite") or (kind == "sqlite") != bool(rest):
        raise ValueError(f"{store!r} is not sqlite:PATH or memory:")
    return rest or ":memory:"


class Options(EntityOptions):
    """Options of ``twistd rmb-registry``."""

    plugin = "rmb-registry"
    longdesc = (
        "The registry of twins stores each twin's number, keys and relays. "
        "Example: twistd -n rmb-registry --listen tcp:9091 --store sqlite:/var/lib/rmb/registry.sqlite"
    )
    rows = (
        listen_row("tcp:9091", "Endpoint string to listen on (tcp:, ssl: and others); repeatable"),
        Option(
            name="store",
            help="Store of the twins: sqlite:PATH or memory:",
            kind=Text("store", _path),
            default="rmb-registry.sqlite",
            default_text="sqlite:rmb-registry.sqlite",
            group=STORAGE,
        ),
        *rows_of(RegistrySettings),
        LOG_FORMAT,
    )


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """Return a registry as a Twisted service."""
    reactor = options.begin(reactor)
    registry = RegistryService(reactor, options["listen"], options["store"], options.make(RegistrySettings))
    return StopOnFailure(reactor, registry, options)
