"""``twistd dmsg-server``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.application.service import IService
from twisted.logger import Logger
from twisted.python.usage import Options as UsageOptions
from twisted.python.usage import UsageError

from dmsg.delegation.admission import HOOK_TIMEOUT, Admission, Hook, KeyList
from dmsg.delegation.dial import parse_address
from dmsg.errors import DmsgError
from dmsg.keys import load_or_create_key
from dmsg.tap import config
from dmsg.tap.options import (
    TELEMETRY_OPTIONS,
    default_key_file,
    descriptors,
    endpoint,
    number,
    own_pid_file,
    seconds,
    set_log_format,
    telemetry,
    url,
)
from dmsg.tap.running import StopOnFailure
from dmsg.transport.policing import MAX_CONNECTIONS, MAX_PER_ADDRESS, MAX_PER_PAIR, MAX_TRANSPORTS, REQUEST_RATE, Limits
from dmsg.transport.server import DRAIN_TIMEOUT, Server
from dmsg.transport.wire import IDS_PER_SIDE

DEFAULT_LISTEN = "tcp:8080"

_log = Logger()


class Options(UsageOptions):
    """Options of ``twistd dmsg-server``."""

    synopsis = "[options]"
    longdesc = (
        "A dmsg server relays frames between clients that know each other by public key. "
        "Example: twistd -n dmsg-server --listen tcp:8080 --public-address relay.example.org:8080 "
        "--discovery http://discovery.example.org:9090 --key-file server.key"
    )
    optParameters = [
        ["public-address", None, None, "HOST:PORT at which clients reach this server", str],
        ["key-file", None, None, "secret key, made if absent [default: ~/.config/dmsg/server.key]", str],
        ["config", "c", None, "TOML file with any of these settings; SIGHUP reads it and the lists again", str],
        ["max-connections", None, str(MAX_CONNECTIONS), "clients at a time", str],
        ["max-transports", None, str(MAX_TRANSPORTS), "transports of one client", str],
        ["max-per-pair", None, str(MAX_PER_PAIR), "transports between one client and another", str],
        ["max-per-address", None, str(MAX_PER_ADDRESS), "connections from one address; 0 means no limit", str],
        ["request-rate", None, str(int(REQUEST_RATE)), "REQUESTs a second of one client; 0 means no limit", str],
        ["byte-rate", None, "0", "bytes a second read from one client; 0 means no limit", str],
        ["allow", None, None, "file with the keys that are admitted, one a line; none means all", str],
        ["deny", None, None, "file with keys that are not admitted", str],
        ["admission-hook", None, None, "URL that is asked about keys on neither list: 200 admits, 403 refuses", str],
        ["admission-timeout", None, str(HOOK_TIMEOUT), "seconds for its answer", str],
        ["admission-down", None, "refuse", "refuse or admit, when it does not answer", str],
        ["drain-timeout", None, str(DRAIN_TIMEOUT), "seconds that leaving waits for streams to move elsewhere", str],
        ["metrics", None, None, "endpoint string for /metrics and /health, as in tcp:9100:interface=127.0.0.1", str],
        *TELEMETRY_OPTIONS,
        ["log-format", None, "text", "text or json", str],
    ]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["listen"] = []
        self["discovery"] = []

    def opt_listen(self, value: str) -> None:
        """Endpoint string to listen on; may be repeated [default: tcp:8080]"""
        self["listen"].append(endpoint(value))

    def opt_discovery(self, value: str) -> None:
        """URL of a discovery to register in; may be repeated"""
        self["discovery"].append(url(value))

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """As usual; remembers what stands on the command line."""
        self._given = config.given(options or ())
        super().parseOptions(options)  # type: ignore[no-untyped-call]

    def read_config(self) -> None:
        """Take what the file says and the command line does not."""
        if self["config"] is None:
            return
        known = [*(str(row[0]) for row in self.optParameters), "listen", "discovery"]
        for name, value in config.read(self["config"], known, ("listen", "discovery")).items():
            if name in self._given:
                continue
            if name in ("listen", "discovery"):
                check = endpoint if name == "listen" else url
                self[name] = [check(one) for one in value]
            else:
                self[name] = value

    def limits(self) -> Limits:
        """What one client may have."""
        return Limits(
            max_connections=min(number(self["max-connections"], 1, 10**6), descriptors()),
            max_transports=number(self["max-transports"], 1, IDS_PER_SIDE),
            max_per_pair=number(self["max-per-pair"], 1, IDS_PER_SIDE),
            max_per_address=number(self["max-per-address"], 0, 10**6),
            request_rate=number(self["request-rate"], 0, 10**6),
            byte_rate=number(self["byte-rate"], 0, 10**12),
        )

    def changed_limits(self) -> Limits:
        """The limits as the file has them now.

        :raises UsageError: it cannot be used; nothing changes then.
        """
        fresh = Options()
        for name, value in self.items():
            if name in self._given or name in ("config", "key-file"):
                fresh[name] = value
        fresh._given = self._given
        fresh.read_config()
        return fresh.limits()

    def admission(self, reactor: Any) -> Admission:
        """Whom to admit.

        :raises UsageError: a list or the hook cannot be used.
        """
        try:
            allow, deny = (KeyList(self[name]) if self[name] else None for name in ("allow", "deny"))
            hook = None
            if self["admission-hook"]:
                hook = Hook(
                    reactor,
                    self["admission-hook"],
                    timeout=seconds(self["admission-timeout"]),
                    when_down=self["admission-down"] == "admit",
                )
        except (DmsgError, ValueError) as error:
            raise UsageError(str(error)) from None
        return Admission(allow, deny, hook)

    def postOptions(self) -> None:
        own_pid_file(self, "dmsg-server")
        self.read_config()
        self["listen"] = self["listen"] or [DEFAULT_LISTEN]
        self.limits()
        for name in ("max-connections", "max-transports", "max-per-pair", "max-per-address"):
            self[name] = int(self[name])
        self.admission(None)
        seconds(self["drain-timeout"])
        if self["admission-down"] not in ("admit", "refuse"):
            raise UsageError("admission-down is refuse or admit")
        if self["metrics"] is not None:
            endpoint(self["metrics"])
        if self["log-format"] not in ("text", "json"):
            raise UsageError("log-format is text or json")
        self["telemetry-settings"] = telemetry(self)
        try:
            if self["public-address"] is not None:
                parse_address(self["public-address"])
            elif self["discovery"] and not any("interface=" in one for one in self["listen"]):
                raise DmsgError("--public-address is needed: where do clients reach this server?")
            self["key"] = load_or_create_key(self["key-file"] or default_key_file("server"))
        except (DmsgError, OSError) as error:
            raise UsageError(str(error)) from None


def makeService(options: Options, reactor: Any = None) -> IService:
    """The server as a Twisted service."""
    if reactor is None:
        from twisted.internet import reactor
    set_log_format(options["log-format"])
    server = Server(
        reactor,
        options["key"],
        options["listen"],
        public_address=options["public-address"],
        discovery=options["discovery"],
        limits=options.limits(),
        admission=options.admission(reactor),
        drain_timeout=seconds(options["drain-timeout"]),
        metrics=options["metrics"],
        telemetry=options["telemetry-settings"],
    )

    def hung_up() -> None:
        try:
            limits = options.changed_limits()
        except UsageError as error:
            _log.error("settings stay as they were: {error}", error=str(error))
            limits = None
        server.reload(limits)

    config.on_hangup(reactor, hung_up)
    service: IService = StopOnFailure(reactor, server)
    return service
