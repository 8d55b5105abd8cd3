"""``twistd rmb-relay``."""

from __future__ import annotations

import re
from typing import Any

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.errors import needs_extra
from dmsg.keylock import KeyLock, hold
from dmsg.net.reactor import Reactor, the_reactor
from dmsg.tap.options import (
    METRICS_OPTION,
    PAGE_TOKEN_OPTION,
    descriptors,
    endpoint,
    number,
    own_pid_file,
    page_token,
    set_log_format,
)
from dmsg.tap.running import StopOnFailure

try:
    from dmsg.rmb.relay.queue.interface import QueueLimits
    from dmsg.rmb.relay.ranker import PERIOD
    from dmsg.rmb.relay.server import MAX_SESSIONS, RelaySettings, RmbRelay
    from dmsg.rmb.relay.site import CONNECT_RATE
    from dmsg.rmb.twins.token import MAX_TTL
    from dmsg.rmb.twins.twin import check_relay
    from dmsg.tap.rmb_options import REGISTRY_OPTION, RmbOptions
except ModuleNotFoundError as error:
    raise SystemExit(f"rmb-relay: {error}; {needs_extra('rmb')}") from None

DEFAULT_LISTEN = "tcp:8080"
DEFAULT_QUEUE = "sqlite:rmb-relay.sqlite"


def listen_endpoint(value: str) -> str:
    """``HOST:PORT`` or ``[ADDRESS]:PORT``, as the reference has it, or an endpoint string."""
    host, colon, port = value.rpartition(":")
    if colon and port.isdigit() and (host.startswith("[") or host.replace(".", "").isdigit()):
        inner = host.strip("[]").replace(":", "\\:")
        return endpoint(f"tcp6:{port}:interface={inner}" if ":" in host else f"tcp:{port}:interface={inner}")
    return endpoint(value)


class Options(RmbOptions):
    """Options of ``twistd rmb-relay``; names and short forms are those of the reference where it has them."""

    synopsis = "[options]"
    longdesc = (
        "A relay of the reliable message bus: twins connect to it and send each other messages. "
        "Example: twistd -n rmb-relay --domain relay.example.org --registry https://registry.example.org "
        "--listen tcp:8080:interface=127.0.0.1"
    )
    optParameters = [
        REGISTRY_OPTION,
        [
            "queue",
            "r",
            DEFAULT_QUEUE,
            "sqlite:PATH or redis://HOST:PORT/DB, whose password is taken from DMSG_REDIS_PASSWORD",
            str,
        ],
        ["user-per-worker", "u", None, "sessions for each of --workers, as the reference says it", str],
        ["workers", "w", None, "with --user-per-worker: how many sessions there may be; there are no workers", str],
        ["max-sessions", None, None, f"sessions at once [default: {MAX_SESSIONS}, and what descriptors allow]", str],
        ["ranker-period", "p", str(int(PERIOD)), "seconds that a failure of another relay counts", str],
        ["queue-length", None, "10000", "messages kept for one session; then the oldest go", str],
        ["queue-size", None, "64", "MiB kept for one session; then the oldest go", str],
        ["queue-total", None, "4096", "MiB kept for all; then nothing more is taken", str],
        [
            "memory",
            None,
            None,
            "MiB held in memory for sessions that read slowly, in all [default: a quarter of the machine's]",
            str,
        ],
        ["token-ttl", None, str(MAX_TTL), "seconds that a token may be good for; 0 means any", str],
        ["connect-rate", None, str(CONNECT_RATE), "connections a second of one address; 0 means no limit", str],
        METRICS_OPTION,
        PAGE_TOKEN_OPTION,
        ["log-format", None, "text", "text or json", str],
    ]
    optFlags = [
        ["token-reuse", None, "take a token for more than one connection"],
        ["durable", None, "keep messages of clients that do not send them again before they are delivered"],
        ["proxied", None, "take addresses from X-Forwarded-For (behind a proxy of your own)"],
    ]

    def __init__(self) -> None:
        super().__init__()
        self["listen"] = []
        self["domain"] = []
        self["debug"] = 0
        self["limit"] = None

    def opt_listen(self, value: str) -> None:
        """Endpoint string, or ADDRESS:PORT; may be repeated [default: tcp:8080]"""
        self["listen"].append(listen_endpoint(value))

    def opt_domain(self, value: str) -> None:
        """Name by which twins list this relay, or its URL; may be repeated"""
        try:
            self["domain"].append(check_relay(value))
        except ValueError as error:
            raise UsageError(str(error)) from None

    def opt_redis(self, value: str) -> None:
        """The same as --queue"""
        self["queue"] = value

    def opt_debug(self) -> None:
        """Log also what is said for debugging"""
        self["debug"] = 1

    def opt_catchup_threshold(self, value: str) -> None:
        """Taken and not needed: no twin is kept so long that its changes would have to be caught up with"""
        self.note("--catchup-threshold is not needed: what is known of twins is looked up again every five minutes")

    def opt_limit(self, value: str) -> None:
        """Messages and bytes a minute of each twin, as in --limit 1000,1048576 (or --limit 1000 1048576)"""
        self["limit"] = value

    several = (*RmbOptions.several, "-m", "--domain")
    opt_l = opt_listen
    opt_m = opt_domain
    opt_d = opt_debug

    def parseOptions(self, options: Any = None) -> None:
        """As usual; ``--limit COUNT SIZE`` may be two words, as the reference has it."""
        words = list(options or ())
        for at, word in enumerate(words):
            head, equals, count = word.partition("=")
            if head != "--limit":
                continue
            last = at + 1 if equals else at + 2
            count = count if equals else (words[at + 1] if at + 1 < len(words) else "")
            # the reference's document: --limit 1000, 1048576
            if re.fullmatch(r"\s*\d+\s*,?\s*", count) and re.fullmatch(
                r"\s*,?\s*\d+\s*", "".join(words[last : last + 1])
            ):
                words[at : last + 1] = [f"--limit={count.strip(' ,')},{words[last].strip(' ,')}"]
            break
        super().parseOptions(words)

    def postOptions(self) -> None:
        own_pid_file(self, "rmb-relay")
        self["listen"] = self["listen"] or [DEFAULT_LISTEN]
        self.check_registry()
        for name, low, high in (
            ("ranker-period", 1, 10**6),
            ("queue-length", 1, 10**7),
            ("queue-size", 1, 10**5),
            ("queue-total", 1, 10**7),
            ("token-ttl", 0, 10**9),
            ("connect-rate", 0, 10**6),
        ):
            self[name] = number(self[name], low, high)
        if self["memory"] is not None:
            self["memory"] = number(self["memory"], 1, 2**20) << 20
        sessions = MAX_SESSIONS
        if self["workers"] is not None or self["user-per-worker"] is not None:
            sessions = number(self["workers"] or "500", 1, 10**6) * number(self["user-per-worker"] or "1000", 1, 10**6)
        if self["max-sessions"] is not None:
            sessions = number(self["max-sessions"], 1, 10**7)
        self["max-sessions"] = sessions
        if self["limit"] is not None:
            words = re.fullmatch(r"\s*([^\s,]+)(?:\s*,\s*|\s+)([^\s,]+)\s*", self["limit"])
            if words is None:
                raise UsageError("--limit takes two numbers: messages and bytes a minute")
            self["limit"] = (number(words[1], 1, 2**31), number(words[2], 1, 2**40))
        if self["metrics"] is not None:
            endpoint(self["metrics"])
        page_token(self)
        kind, _, rest = self["queue"].partition(":")
        if kind not in ("sqlite", "redis") or not rest:
            raise UsageError("queue is sqlite:PATH or redis://HOST:PORT/DB")
        if self["log-format"] not in ("text", "json"):
            raise UsageError("log-format is text or json")

    def hold_queue(self) -> KeyLock:
        """Say that this relay uses its file of messages: a second one would deliver each twice.

        :raises KeyInUse: another process has it.
        """
        path = self["queue"].removeprefix("sqlite:")
        return hold(path, "twistd rmb-relay", advice="stop that, or give this relay another --queue")

    def settings(self) -> RelaySettings:
        """What the relay is told."""
        return RelaySettings(
            listen=self["listen"],
            registry=self["registry"],
            domains=frozenset(self["domain"]),
            queue=self["queue"],
            limit=self["limit"],
            ranker_period=float(self["ranker-period"]),
            max_sessions=min(self["max-sessions"], descriptors()),
            max_token_ttl=self["token-ttl"] or None,
            proxied=bool(self["proxied"]),
            connect_rate=self["connect-rate"],
            token_reuse=bool(self["token-reuse"]),
            durable=bool(self["durable"]),
            metrics=self["metrics"],
            page_token=page_token(self),
            memory=self["memory"],
            queue_limits=QueueLimits(
                self["queue-length"], self["queue-size"] * 1024 * 1024, self["queue-total"] * 1024 * 1024
            ),
        )


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """A relay as a Twisted service."""
    reactor = the_reactor(reactor)
    set_log_format(options["log-format"], debug=bool(options["debug"]))
    in_file = options["queue"].startswith("sqlite:") and options["queue"] != "sqlite::memory:"
    service: IService = StopOnFailure(
        reactor, RmbRelay(reactor, options.settings()), options, options.hold_queue if in_file else None
    )
    return service
