"""Plugin ``twistd dmsg-discovery``: its options, and its service."""

from __future__ import annotations

from pathlib import Path

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.base.options import STORAGE, TELEMETRY, Option, Text, checked_by, rows_of
from dmsg.base.urls import URL
from dmsg.discovery.service.ranking import RankingFile
from dmsg.discovery.service.service import Discovery
from dmsg.discovery.service.settings import DiscoverySettings
from dmsg.discovery.store.opening import parse_store
from dmsg.keys import PubKey
from dmsg.messaging.proofs import OPENINGS
from dmsg.net.reactor import Reactor
from dmsg.tap.options import LOG_FORMAT, EntityOptions, listen_row
from dmsg.tap.running import StopOnFailure
from dmsg.tap.telemetry import TELEMETRY_ROWS, sender, telemetry


class Options(EntityOptions):
    """Options of ``twistd dmsg-discovery``."""

    plugin = "dmsg-discovery"
    longdesc = (
        "dmsg discovery keeps signed entries that say which public key is reached through which servers. "
        "Example: twistd -n dmsg-discovery --listen tcp:9090 --store sqlite:/var/lib/dmsg/discovery.sqlite"
    )
    rows = (
        listen_row("tcp:9090", "Endpoint string to listen on (tcp:, ssl: and others); repeatable"),
        Option(
            name="store",
            help=(
                "Store of the entries: memory:, sqlite:PATH or redis://HOST:PORT/DB (password in DMSG_REDIS_PASSWORD)"
            ),
            kind=Text("store", checked_by(parse_store)),
            default="sqlite:dmsg-discovery.sqlite",
            group=STORAGE,
        ),
        *rows_of(DiscoverySettings),
        Option(
            name="ranking",
            help="File with a signed ranking of servers (dmsg analytics rank), read again when it changes",
            kind=Text("file"),
            group=STORAGE,
        ),
        Option(
            name="ranking-key",
            help="Public key that must have signed the ranking",
            kind=Text("public key", PubKey.from_text),
            group=STORAGE,
        ),
        *TELEMETRY_ROWS,
        Option(
            name="telemetry-discovery",
            help="URL of the discovery that knows the collector",
            kind=URL,
            default_text="this one, over plain HTTP",
            group=TELEMETRY,
        ),
        LOG_FORMAT,
    )

    def finish(self) -> None:
        self["telemetry-settings"] = telemetry(self)
        reached = any(one.startswith("tcp:") for one in self["listen"])
        if self["telemetry-to"] is not None and self["telemetry-discovery"] is None and not reached:
            raise UsageError(
                "--telemetry-to needs --telemetry-discovery here: this discovery does not listen for plain HTTP"
            )
        if (self["ranking"] is None) != (self["ranking-key"] is None):
            raise UsageError("--ranking and --ranking-key must be given together")


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """Return discovery as a Twisted service."""
    reactor = options.begin(reactor)
    settings = options.make(
        DiscoverySettings,
        openings=OPENINGS,
        ranking=None if options["ranking"] is None else RankingFile(Path(options["ranking"]), options["ranking-key"]),
        telemetry=options["telemetry-settings"],
    )
    discovery = Discovery(reactor, options["listen"], options["store"], settings)

    def where() -> list[str]:
        return [options["telemetry-discovery"] or discovery.own_url()]

    follower = sender(reactor, options, where, discovery.telemetry)
    return StopOnFailure(reactor, discovery, options, follower=follower)
