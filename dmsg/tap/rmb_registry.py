"""``twistd rmb-registry``."""

from __future__ import annotations

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.errors import needs_extra
from dmsg.net.reactor import Reactor, the_reactor
from dmsg.tap.options import EntityOptions, endpoint, number, own_pid_file, set_log_format
from dmsg.tap.running import StopOnFailure

try:
    from dmsg.rmb.registry.service import BURST, RATE, RegistryService
except ModuleNotFoundError as error:
    raise SystemExit(f"rmb-registry: {error}; {needs_extra('rmb')}") from None

DEFAULT_LISTEN = "tcp:9091"
DEFAULT_STORE = "sqlite:rmb-registry.sqlite"


class Options(EntityOptions):
    """Options of ``twistd rmb-registry``."""

    synopsis = "[options]"
    longdesc = (
        "The registry of twins: who has which number, key, and relays. "
        "Example: twistd -n rmb-registry --listen tcp:9091 --store sqlite:/var/lib/rmb/registry.sqlite"
    )
    optParameters = [
        ["store", None, DEFAULT_STORE, "sqlite:PATH, or memory:", str],
        ["rate-limit", None, str(int(RATE)), "requests a second of one address; 0 means no limit", str],
        ["burst", None, str(int(BURST)), "requests of one address at once", str],
        ["log-format", None, "text", "text or json", str],
    ]
    optFlags = [["proxied", None, "take addresses from X-Forwarded-For (behind a proxy of your own)"]]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["listen"] = []

    def opt_listen(self, value: str) -> None:
        """Endpoint string to listen on, ssl: too; may be repeated [default: tcp:9091]"""
        self["listen"].append(endpoint(value))

    def postOptions(self) -> None:
        own_pid_file(self, "rmb-registry")
        self["listen"] = self["listen"] or [DEFAULT_LISTEN]
        self["rate-limit"] = number(self["rate-limit"], 0, 10**6)
        self["burst"] = number(self["burst"], 1, 10**6)
        if self["log-format"] not in ("text", "json"):
            raise UsageError("log-format is text or json")
        kind, colon, rest = self["store"].partition(":")
        if not colon or kind not in ("memory", "sqlite") or (kind == "sqlite") != bool(rest):
            raise UsageError("store is sqlite:PATH or memory:")
        self["store"] = rest or ":memory:"


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """A registry as a Twisted service."""
    reactor = the_reactor(reactor)
    set_log_format(options["log-format"])
    registry = RegistryService(
        reactor,
        options["listen"],
        options["store"],
        rate=options["rate-limit"],
        burst=options["burst"],
        proxied=bool(options["proxied"]),
    )
    service: IService = StopOnFailure(reactor, registry, options)
    return service
