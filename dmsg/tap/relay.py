"""Options that the servers of all families have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import Clock
from twisted.logger import Logger
from twisted.python.usage import UsageError

from dmsg.errors import DmsgError
from dmsg.keylock import KeyLock, hold
from dmsg.keys import default_key, load_or_create_key
from dmsg.net.addresses import parse_address
from dmsg.net.reactor import Reactor
from dmsg.servers.admission import HOOK_TIMEOUT, Admission, Hook, KeyList
from dmsg.servers.settings import ServerSettings
from dmsg.tap import config
from dmsg.tap.options import (
    METRICS_OPTION,
    PAGE_TOKEN_OPTION,
    EntityOptions,
    default_key_file,
    endpoint,
    number,
    own_pid_file,
    page_token,
    seconds,
    url,
)

DEFAULT_LISTEN = "tcp:8080"
RELOADED = frozenset(
    ["max-connections", "max-transports", "max-per-pair", "max-per-address", "request-rate", "open-rate", "byte-rate"]
)
"""Settings that SIGHUP changes."""
_T = TypeVar("_T")

_log = Logger()


def relay_parameters(key_name: str, drain_timeout: float) -> list[list[Any]]:
    """Rows of ``optParameters``.  :param key_name: of the key file, when none is said."""
    return [
        ["public-address", None, None, "HOST:PORT at which clients reach this server", str],
        ["key-file", None, None, f"secret key [default: ~/.config/dmsg/{key_name}.key, made if absent]", str],
        ["config", "c", None, "TOML file with any of these settings; SIGHUP reads it again", str],
        [
            "allow",
            None,
            None,
            "file with the keys that are admitted, one a line, read again when it changes; none means all",
            str,
        ],
        ["deny", None, None, "file with keys that are not admitted", str],
        [
            "admission-hook",
            None,
            None,
            "URL that is asked about keys that are not denied, where there is no --allow: 200 admits, 403 refuses",
            str,
        ],
        ["admission-timeout", None, str(HOOK_TIMEOUT), "seconds for its answer", str],
        ["admission-down", None, "refuse", "refuse or admit, when it does not answer", str],
        ["drain-timeout", None, str(drain_timeout), "seconds that leaving waits for streams", str],
        METRICS_OPTION,
        PAGE_TOKEN_OPTION,
        [
            "memory",
            None,
            None,
            "MiB held for clients that read slowly, in all [default: a quarter of the machine's]",
            str,
        ],
        ["log-format", None, "text", "text or json", str],
    ]


def _one_of(value: str, *possible: str) -> str:
    if value not in possible:
        raise UsageError(f"{value!r} is not {' or '.join(possible)}")
    return value


class RelayOptions(EntityOptions):
    """What a server of any family is told."""

    optParameters: list[list[Any]]
    optFlags = [
        ["create", None, "make the key file that is named, if it is absent"],
        ["share", None, "use the key though another program on this machine uses it; only the newest is reached"],
    ]
    synopsis = "[options]"
    plugin = ""
    """Of twistd."""
    key_name = ""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.from_file: dict[str, Any] = {}
        self.given: frozenset[str] = frozenset()
        self.needs_restart: list[str] = []
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
        self.given = config.given(options or ())
        super().parseOptions(options)

    def read_config(self) -> None:
        """Take what the file says and the command line does not."""
        if self["config"] is None:
            return
        known = [*(str(row[0]) for row in self.optParameters), "listen", "discovery"]
        self.from_file = config.read(self["config"], known, ("listen", "discovery"))
        for name, value in self.from_file.items():
            if name in self.given:
                continue
            if name in ("listen", "discovery"):
                self[name] = value
                check = endpoint if name == "listen" else url
                self[name] = self.checked(name, lambda values, check=check: [check(one) for one in values])
            else:
                self[name] = value

    def limits(self) -> Any:
        """What one client may have."""
        raise NotImplementedError

    def checked(self, name: str, check: Callable[..., _T], *arguments: Any) -> _T:
        """What ``check`` makes of a setting.

        :raises UsageError: it cannot be; says which setting, and where it stands.
        """
        try:
            return check(self[name], *arguments)
        except (UsageError, DmsgError, ValueError) as error:
            in_file = name in self.from_file and name not in self.given
            where = f"{config.where(self['config'], name)}: " if in_file else ""
            raise UsageError(f"{where}{name}: {error}") from None

    def number(self, name: str, low: int, high: int) -> int:
        """A setting that is a whole number.

        :raises UsageError: it is none, or not within these.
        """
        return self.checked(name, number, low, high)

    def memory(self) -> int | None:
        """Bytes of ``--memory``; None: nothing is said.

        :raises UsageError: it cannot be.
        """
        return None if self["memory"] is None else self.number("memory", 1, 2**20) << 20

    def changed_limits(self) -> Any:
        """The limits as the file has them now.

        :raises UsageError: it cannot be used; nothing changes then.
        After it :attr:`needs_restart` has the names of settings that are others now, and wait for a restart.
        """
        fresh = type(self)()
        for name, value in self.items():
            if name in self.given or name in ("config", "key-file", "create", "share"):
                fresh[name] = value
        fresh.given = self.given
        fresh.read_config()
        limits = fresh.limits()
        fresh.check_values()
        names = set(fresh.from_file) | set(self.from_file)
        changed = {name for name in names if fresh.from_file.get(name) != self.from_file.get(name)}
        self.needs_restart = sorted(changed - RELOADED - self.given)
        return limits

    def reload_on_hangup(self, reactor: Reactor, server: Any) -> None:
        """SIGHUP: read the settings and lists again."""

        def hung_up() -> None:
            try:
                limits = self.changed_limits()
            except UsageError as error:
                _log.error("settings stay as they were: {error}", error=str(error))
                limits = None
            else:
                if self.needs_restart:
                    _log.warn("changed, but only with a restart: {names}", names=", ".join(self.needs_restart))
            server.reload(limits)

        config.on_hangup(reactor, hung_up)

    def hold_key(self) -> KeyLock:
        """The key file is in use from now on.

        :raises KeyInUse: another program has taken it.
        """
        return hold(self["key-file"], self.plugin, share=bool(self["share"]))

    def settings(self, reactor: IReactorTime) -> ServerSettings:
        """What servers of all families are told."""
        return ServerSettings(
            public_address=self["public-address"],
            discovery=self["discovery"],
            admission=self.admission(reactor),
            drain_timeout=seconds(self["drain-timeout"]),
            metrics=self["metrics"],
            page_token=page_token(self),
            memory=self.memory(),
        )

    def admission(self, reactor: IReactorTime) -> Admission:
        """Whom to admit.

        :raises UsageError: a list or the hook cannot be used.
        """
        try:
            allow, deny = (self.checked(name, KeyList) if self[name] else None for name in ("allow", "deny"))
            hook = None
            if self["admission-hook"]:
                hook = Hook(
                    reactor,
                    self["admission-hook"],
                    timeout=self.checked("admission-timeout", seconds),
                    when_down=self["admission-down"] == "admit",
                )
        except (DmsgError, ValueError) as error:
            raise UsageError(str(error)) from None
        return Admission(allow, deny, hook)

    def check_values(self) -> None:
        """Check what the servers of all families have.

        :raises UsageError: one of them cannot be.
        """
        self.memory()
        self.admission(Clock())  # made once to see whether it can be
        self.checked("drain-timeout", seconds)
        self.checked("admission-down", _one_of, "refuse", "admit")
        self.checked("log-format", _one_of, "text", "json")
        if self["metrics"] is not None:
            self.checked("metrics", endpoint)
        page_token(self)
        if self["public-address"] is not None:
            self.checked("public-address", parse_address)

    def check_own(self) -> None:
        """Check what only this family has.

        :raises UsageError: something cannot be.
        """

    def postOptions(self) -> None:
        own_pid_file(self, self.plugin)
        self.read_config()
        self["listen"] = self["listen"] or [DEFAULT_LISTEN]
        self.limits()
        self.check_values()
        self.check_own()
        try:
            if (
                self["public-address"] is None
                and self["discovery"]
                and not any("interface=" in one for one in self["listen"])
            ):
                raise DmsgError("--public-address is needed: where do clients reach this server?")
            if self["key-file"]:
                self["key"] = load_or_create_key(self["key-file"], create=bool(self["create"]))
            else:
                self["key-file"] = default_key_file(self.key_name)
                self["key"] = default_key(self["key-file"])
            # held from the start of the service on, which is after twistd has gone into the background
            hold(self["key-file"], self.plugin, share=bool(self["share"])).release()
        except (DmsgError, OSError) as error:
            raise UsageError(str(error)) from None
