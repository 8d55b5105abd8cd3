"""``twistd dmsg-collector``."""

from __future__ import annotations

from pathlib import Path

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.collector.service import Collector
from dmsg.collector.store import LIMIT, RESERVE
from dmsg.collector.wire import PORT
from dmsg.errors import DmsgError
from dmsg.keylock import KeyLock, hold
from dmsg.keys import default_key, load_or_create_key
from dmsg.net.reactor import Reactor, the_reactor
from dmsg.servers.admission import KeyList
from dmsg.tap.config import on_hangup
from dmsg.tap.options import (
    METRICS_OPTION,
    PAGE_TOKEN_OPTION,
    EntityOptions,
    default_key_file,
    endpoint,
    number,
    own_pid_file,
    page_token,
    set_log_format,
    url,
)
from dmsg.tap.running import StopOnFailure

PLUGIN = "dmsg-collector"


class Options(EntityOptions):
    """Options of ``twistd dmsg-collector``."""

    synopsis = "[options]"
    longdesc = (
        "Takes finished files of events from servers and discoveries, over dmsg, and keeps them for dmsg analytics. "
        "Example: twistd -n dmsg-collector --discovery http://discovery.example.org:9090 --senders senders.txt "
        "--store /srv/spool"
    )
    optParameters = [
        ["store", None, None, "directory of the files: STORE/SENDER/DAY/NAME", str],
        ["senders", None, None, "file with the keys that may bring files, one a line, which is watched", str],
        ["key-file", None, None, "the collector's key [default: collector.key in the directory of settings]", str],
        ["port", None, str(PORT), "of dmsg, 1 to 65535", str],
        ["limit", None, str(LIMIT >> 30), "GiB of files that are kept; then senders wait", str],
        ["reserve", None, str(RESERVE >> 20), "MiB of the disk that stay free", str],
        METRICS_OPTION,
        PAGE_TOKEN_OPTION,
        ["log-format", None, "text", "text or json", str],
    ]
    optFlags = [
        ["create", None, "make the key file that is named, if it is absent"],
        ["share", None, "use the key though another program on this machine uses it; only the newest is reached"],
    ]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self["discovery"] = []

    def opt_discovery(self, value: str) -> None:
        """URL of a discovery; may be repeated"""
        self["discovery"].append(url(value))

    def postOptions(self) -> None:
        own_pid_file(self, PLUGIN)
        for name, what in (("store", "where are the files to be?"), ("senders", "from whom are files taken?")):
            if self[name] is None:
                raise UsageError(f"--{name} is needed: {what}")
        if not self["discovery"]:
            raise UsageError("--discovery is needed: where is the collector found?")
        if self["log-format"] not in ("text", "json"):
            raise UsageError("log-format is text or json")
        if self["metrics"] is not None:
            endpoint(self["metrics"])
        page_token(self)
        self["port"] = number(self["port"], 1, 65535)
        self["limit"] = number(self["limit"], 1, 2**20) << 30
        self["reserve"] = number(self["reserve"], 0, 2**30) << 20
        self["store"] = Path(self["store"]).absolute()
        try:
            self["senders"] = KeyList(str(Path(self["senders"]).absolute()))
            if self["key-file"]:
                self["key"] = load_or_create_key(self["key-file"], create=bool(self["create"]))
            else:
                self["key-file"] = default_key_file("collector")
                self["key"] = default_key(self["key-file"])
            self.hold_key().release()
        except (DmsgError, OSError) as error:
            raise UsageError(str(error)) from None

    def hold_key(self) -> KeyLock:
        """The key file is in use from now on.

        :raises KeyInUse: another program has taken it.
        """
        return hold(self["key-file"], PLUGIN, share=bool(self["share"]))


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """A collector as a Twisted service."""
    reactor = the_reactor(reactor)
    set_log_format(options["log-format"])
    collector = Collector(
        reactor,
        options["key"],
        options["store"],
        options["senders"],
        options["discovery"],
        port=options["port"],
        limit=options["limit"],
        reserve=options["reserve"],
        metrics=options["metrics"],
        page_token=page_token(options),
    )
    on_hangup(reactor, collector.reload)
    service: IService = StopOnFailure(reactor, collector, options, options.hold_key)
    return service
