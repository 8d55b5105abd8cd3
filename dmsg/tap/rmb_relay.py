"""Plugin ``twistd rmb-relay``: its options, and its service."""

from __future__ import annotations

import re
from collections.abc import Sequence

from twisted.application.service import IService

from dmsg.base.options import LIMITS, STORAGE, Number, Option, Text, checked_by, rows_of
from dmsg.errors import needs_extra
from dmsg.keylock import KeyLock, hold_key
from dmsg.net.descriptors import raise_descriptor_limit
from dmsg.net.listening import check_endpoint
from dmsg.net.reactor import Reactor
from dmsg.rmb.relay.settings import check_queue
from dmsg.tap.config import GivenText
from dmsg.tap.options import DEBUG, LOG_FORMAT, UNSET_VALUES, listen_row
from dmsg.tap.running import StopOnFailure

try:
    from dmsg.rmb.relay.queue.interface import QueueLimits
    from dmsg.rmb.relay.server import RmbRelay
    from dmsg.rmb.relay.settings import RelaySettings
    from dmsg.tap.rmb_options import REGISTRY_ROW, RmbOptions
except ModuleNotFoundError as error:
    raise SystemExit(f"rmb-relay: {error}; {needs_extra('rmb')}") from None


def listen_endpoint(value: str) -> str:
    """Return an endpoint string for an address to listen on.

    :param value: ``HOST:PORT`` or ``[ADDRESS]:PORT``, as in rmb-rs, or an endpoint string.
    """
    host, colon, port = value.rpartition(":")
    if colon and port.isdigit() and (host.startswith("[") or host.replace(".", "").isdigit()):
        inner = host.strip("[]").replace(":", "\\:")
        return check_endpoint(f"tcp6:{port}:interface={inner}" if ":" in host else f"tcp:{port}:interface={inner}")
    return check_endpoint(value)


class Options(RmbOptions):
    """Options of ``twistd rmb-relay``.  Options that rmb-rs has, too, have the same names and short forms."""

    plugin = "rmb-relay"
    longdesc = (
        "A relay of the reliable message bus: twins connect to it and send each other messages. "
        "Example: twistd -n rmb-relay --domain relay.example.org --registry https://registry.example.org "
        "--listen tcp:8080:interface=127.0.0.1"
    )
    rows = (
        listen_row(
            "tcp:8080",
            "Endpoint string or ADDRESS:PORT to listen on; repeatable",
            kind=Text("endpoint string, or ADDRESS:PORT", listen_endpoint),
            short="l",
        ),
        REGISTRY_ROW,
        Option(
            name="queue",
            short="r",
            help="Queue of messages: sqlite:PATH or redis://HOST:PORT/DB (password in DMSG_REDIS_PASSWORD)",
            kind=Text("queue", checked_by(check_queue)),
            default="sqlite:rmb-relay.sqlite",
            group=STORAGE,
        ),
        Option(
            name="user-per-worker",
            short="u",
            help="Sessions per worker; --workers times this number is the default of --max-sessions",
            kind=Number(1, 10**6, "sessions"),
            group=LIMITS,
        ),
        Option(
            name="workers",
            short="w",
            help="Number of workers; accepted for compatibility with rmb-rs, and used only to compute --max-sessions",
            kind=Number(1, 10**6, "workers"),
            group=LIMITS,
        ),
        *rows_of(RelaySettings),
        *rows_of(QueueLimits),
        LOG_FORMAT,
        DEBUG,
    )

    def opt_redis(self, value: str) -> None:
        """Same as --queue; accepted for compatibility with rmb-rs"""
        self["queue"] = GivenText(value)

    def opt_catchup_threshold(self, value: str) -> None:
        """Do nothing; accepted for compatibility with rmb-rs"""
        self.note("--catchup-threshold does nothing: the relay looks each twin up again every five minutes")

    several = (*RmbOptions.several, "-m", "--domain")

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse the options.  As in rmb-rs, ``--limit COUNT SIZE`` may have its two values as separate arguments."""
        words = list(options or ())
        for at, word in enumerate(words):
            head, equals, count = word.partition("=")
            if head != "--limit":
                continue
            last = at + 1 if equals else at + 2
            count = count if equals else (words[at + 1] if at + 1 < len(words) else "")
            # Commas are removed, because the documentation of rmb-rs has the example ``--limit 1000, 1048576``.
            if re.fullmatch(r"\s*\d+\s*,?\s*", count) and re.fullmatch(
                r"\s*,?\s*\d+\s*", "".join(words[last : last + 1])
            ):
                words[at : last + 1] = [f"--limit={count.strip(' ,')},{words[last].strip(' ,')}"]
            break
        super().parseOptions(words)

    def finish(self) -> None:
        self.check_registry()
        by_worker = self["workers"] is not None or self["user-per-worker"] is not None
        if by_worker and self._given_options["max-sessions"] in UNSET_VALUES:
            self["max-sessions"] = (self["workers"] or 500) * (self["user-per-worker"] or 1000)

    def hold_queue(self) -> KeyLock:
        """Lock this relay's file of queued messages.  A second relay with the same file would deliver each message
        twice.

        :raises KeyInUse: another process uses the file.
        """
        path = self["queue"].removeprefix("sqlite:")
        return hold_key(path, "twistd rmb-relay", advice="stop that, or give this relay another --queue")

    def settings(self) -> RelaySettings:
        """Return the settings of the relay."""
        return self.make(
            RelaySettings,
            listen=self["listen"],
            registry=self["registry"],
            domains=frozenset(self["domain"]),
            queue=self["queue"],
            max_sessions=min(self["max-sessions"], raise_descriptor_limit()),
            max_token_ttl=self["token-ttl"] or None,
            queue_limits=self.make(QueueLimits),
        )


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """Return a relay as a Twisted service."""
    reactor = options.begin(reactor)
    in_file = options["queue"].startswith("sqlite:") and options["queue"] != "sqlite::memory:"
    return StopOnFailure(
        reactor, RmbRelay(reactor, options.settings()), options, options.hold_queue if in_file else None
    )
