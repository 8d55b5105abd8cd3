"""Plugin ``twistd dmsg-collector``: its options, and its service."""

from __future__ import annotations

from pathlib import Path

from twisted.application.service import IService
from twisted.python.usage import UsageError

from dmsg.base.options import ACCESS, NETWORK, STORAGE, Option, Text, rows_of
from dmsg.base.urls import URL
from dmsg.collector.service import Collector, CollectorSettings
from dmsg.net.reactor import Reactor
from dmsg.servers.admission import KeyList
from dmsg.tap.config import on_hangup
from dmsg.tap.options import LOG_FORMAT, KeyOptions, key_rows
from dmsg.tap.running import StopOnFailure


def _senders(path: str) -> KeyList:
    return KeyList(str(Path(path).absolute()))


class Options(KeyOptions):
    """Options of ``twistd dmsg-collector``."""

    plugin = "dmsg-collector"
    key_name = "collector"
    longdesc = (
        "A collector receives finished event files from servers and discoveries over dmsg "
        "and stores them for dmsg analytics. "
        "Example: twistd -n dmsg-collector --discovery http://discovery.example.org:9090 --senders senders.txt "
        "--store /srv/spool"
    )
    rows = (
        Option(
            name="store",
            help="Directory for the received files (STORE/SENDER/DAY/NAME)",
            kind=Text("directory", lambda text: Path(text).absolute()),
            group=STORAGE,
        ),
        Option(
            name="senders",
            help="File with the keys that may send files, one per line, read again when it changes",
            kind=Text("file", _senders),
            group=ACCESS,
        ),
        Option(name="discovery", help="URL of a discovery; repeatable", kind=URL, repeated=True, group=NETWORK),
        *key_rows("File with the collector's secret key (mode 0600)", "collector.key in the directory of settings"),
        *rows_of(CollectorSettings),
        LOG_FORMAT,
    )

    def finish(self) -> None:
        for name, what in (
            ("store", "the directory for received files"),
            ("senders", "the file with the senders' keys"),
        ):
            if self[name] is None:
                raise UsageError(f"--{name} is needed: {what}")
        if not self["discovery"]:
            raise UsageError("--discovery is needed: the URL of the discovery in which senders find the collector")
        self.take_key()


def makeService(options: Options, reactor: Reactor | None = None) -> IService:
    """Return a collector as a Twisted service."""
    reactor = options.begin(reactor)
    collector = Collector(
        reactor,
        options["key"],
        options["store"],
        options["senders"],
        options["discovery"],
        options.make(CollectorSettings),
    )
    on_hangup(reactor, collector.reload)
    return StopOnFailure(reactor, collector, options, options.hold_key)
