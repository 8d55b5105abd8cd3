"""``twistd dmsg-discovery``."""

from __future__ import annotations

from pathlib import Path

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.discovery.service.ranking import RankingFile
from dmsg.discovery.service.service import Discovery
from dmsg.discovery.service.settings import (
    BURST,
    ENTRY_TTL,
    MAX_SERVERS,
    POST_BURST,
    POST_RATE,
    RATE,
    SERVER_TTL,
    DiscoverySettings,
)
from dmsg.discovery.store import StoreError, parse_store
from dmsg.errors import KeyFormatError
from dmsg.keys import PubKey
from dmsg.messaging.openings import OPENINGS
from dmsg.net.reactor import Reactor, the_reactor
from dmsg.tap.options import (
    METRICS_OPTION,
    PAGE_TOKEN_OPTION,
    EntityOptions,
    endpoint,
    number,
    own_pid_file,
    page_token,
    set_log_format,
    url,
)
from dmsg.tap.running import StopOnFailure
from dmsg.tap.telemetry import TELEMETRY_OPTIONS, sender, telemetry

DEFAULT_LISTEN = "tcp:9090"
DEFAULT_STORE = "sqlite:dmsg-discovery.sqlite"


class Options(EntityOptions):
    """Options of ``twistd dmsg-discovery``."""

    synopsis = "[options]"
    longdesc = (
        "dmsg discovery keeps signed entries that say which public key is reached through which servers. "
        "Example: twistd -n dmsg-discovery --listen tcp:9090 --store sqlite:/var/lib/dmsg/discovery.sqlite"
    )
    optParameters = [
        [
            "store",
            None,
            DEFAULT_STORE,
            "memory:, sqlite:PATH or redis://HOST:PORT/DB; the password of Redis is taken from DMSG_REDIS_PASSWORD",
            str,
        ],
        ["rate-limit", None, str(int(RATE)), "requests a second of one address; 0 means no limit", str],
        ["burst", None, str(int(BURST)), "requests of one address at once", str],
        ["post-rate", None, str(int(POST_RATE)), "signed entries a second of one address", str],
        ["post-burst", None, str(int(POST_BURST)), "signed entries of one address at once", str],
        [
            "server-ttl",
            None,
            str(int(SERVER_TTL)),
            "seconds without a refresh after which a server is not listed; 0: never",
            str,
        ],
        [
            "entry-ttl",
            None,
            str(int(ENTRY_TTL / 86400)),
            "days after which an entry is dropped whose owner does not post it again and again; servers: are not seen",
            str,
        ],
        [
            "memory",
            None,
            None,
            "MiB of entries that are kept; then who posted most loses the oldest "
            "[default: 4096, in memory a quarter of the machine's]",
            str,
        ],
        ["max-servers", None, str(MAX_SERVERS), "servers in one answer", str],
        ["ranking", None, None, "file with a signed ranking of servers, which is watched (dmsg analytics rank)", str],
        ["ranking-key", None, None, "public key whose rankings are believed", str],
        *TELEMETRY_OPTIONS,
        [
            "telemetry-discovery",
            None,
            None,
            "URL of the discovery in which the collector is found [default: this one, over plain HTTP]",
            str,
        ],
        METRICS_OPTION,
        PAGE_TOKEN_OPTION,
        ["log-format", None, "text", "text or json", str],
    ]
    optFlags = [
        ["proxied", None, "take addresses from X-Forwarded-For (behind a proxy of your own)"],
        ["no-looks", None, "list servers without connecting to them to see whether they are there and have their key"],
        ["private-servers", None, "connect to servers in private networks, too, whoever posts their entries"],
    ]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["listen"] = []

    def opt_listen(self, value: str) -> None:
        """Endpoint string to listen on, ssl: too; may be repeated [default: tcp:9090]"""
        self["listen"].append(endpoint(value))

    def postOptions(self) -> None:
        own_pid_file(self, "dmsg-discovery")
        self["listen"] = self["listen"] or [DEFAULT_LISTEN]
        for name, low, high in (
            ("rate-limit", 0, 10**6),
            ("burst", 1, 10**6),
            ("server-ttl", 0, 10**6),
            ("post-rate", 1, 10**6),
            ("post-burst", 1, 10**6),
            ("max-servers", 1, 1000),
            ("entry-ttl", 1, 36500),
        ):
            self[name] = number(self[name], low, high)
        self["store-limit"] = None
        if self["memory"] is not None:
            self["store-limit"] = number(self["memory"], 1, 10**7) * 1024 * 1024
        if self["log-format"] not in ("text", "json"):
            raise UsageError("log-format is text or json")
        if self["metrics"] is not None:
            endpoint(self["metrics"])
        page_token(self)
        self["telemetry-settings"] = telemetry(self)
        if self["telemetry-discovery"] is not None:
            url(self["telemetry-discovery"])
        elif self["telemetry-to"] is not None and not any(one.startswith("tcp:") for one in self["listen"]):
            raise UsageError("telemetry-to needs --telemetry-discovery here: this one is not reached over plain HTTP")
        if (self["ranking"] is None) != (self["ranking-key"] is None):
            raise UsageError("ranking and ranking-key go together")
        if self["ranking-key"] is not None:
            try:
                self["ranking-key"] = PubKey.from_text(self["ranking-key"])
            except KeyFormatError as error:
                raise UsageError(f"ranking-key: {error}") from None
        try:
            parse_store(self["store"])
        except StoreError as error:
            raise UsageError(f"store: {error}") from None


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """Discovery as a Twisted service."""
    reactor = the_reactor(reactor)
    set_log_format(options["log-format"])
    settings = DiscoverySettings(
        rate=options["rate-limit"],
        burst=options["burst"],
        post_rate=options["post-rate"],
        post_burst=options["post-burst"],
        looks=not options["no-looks"],
        private_servers=bool(options["private-servers"]),
        openings=OPENINGS,
        store_limit=options["store-limit"],
        entry_ttl=options["entry-ttl"] * 86400.0,
        proxied=bool(options["proxied"]),
        max_servers=options["max-servers"],
        server_ttl=options["server-ttl"],
        ranking=None if options["ranking"] is None else RankingFile(Path(options["ranking"]), options["ranking-key"]),
        telemetry=options["telemetry-settings"],
        metrics=options["metrics"],
        page_token=page_token(options),
    )
    discovery = Discovery(reactor, options["listen"], options["store"], settings)

    def where() -> list[str]:
        return [options["telemetry-discovery"] or discovery.own_url()]

    follower = sender(reactor, options, where, discovery.telemetry)
    service: IService = StopOnFailure(reactor, discovery, options, follower=follower)
    return service
