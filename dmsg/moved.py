"""Names of modules until 0.1: they still work, with a warning, and go with the next release.

:data:`MOVED` says for each where its contents are now.  What programs should
import instead stands in the documentation's list of public names: ``dmsg``,
``dmsg.v2019``, ``dmsg.messaging``, ``dmsg.rmb`` and ``dmsg.testing``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "buckets": "base.buckets",
    "buffers": "base.buffers",
    "delegation": "clients servers",
    "delegation.admission": "servers.admission",
    "delegation.client": "clients.client clients.choice",
    "delegation.dial": "clients.dial net.retry net.connect",
    "delegation.doorman": "clients.doorman",
    "delegation.entries": "clients.entries",
    "delegation.holdings": "servers.holdings",
    "delegation.lifecycle": "clients.lifecycle",
    "delegation.publish": "clients.publish discovery.contest",
    "delegation.registration": "servers.registration",
    "delegation.selflook": "servers.selflook",
    "delegation.server": "servers.server servers.serving servers.settings",
    "delegation.servers": "clients.servers",
    "delegation.shared": "clients.shared",
    "delegation.status": "pages.site",
    "isolate": "net.isolate",
    "memory": "base.memory",
    "messaging.acks": "messaging.core.acks",
    "messaging.agreement": "messaging.core.agreement",
    "messaging.congestion": "messaging.core.congestion",
    "messaging.events": "messaging.core.events",
    "messaging.handshake": "messaging.core.handshake",
    "messaging.peers": "messaging.core.peers",
    "messaging.policing": "messaging.core.policing base.policing",
    "messaging.relay": "messaging.core.relay",
    "messaging.secure": "messaging.core.secure",
    "messaging.service": "messaging.client",
    "messaging.state": "messaging.core.state",
    "messaging.wire": "messaging.core.wire",
    "names": "clients.names",
    "net.acceptor": "net.links.acceptor",
    "net.body": "net.web.body",
    "net.channel": "net.web.channel",
    "net.connect": "net.links.connect",
    "net.endpoints": "net.streams.endpoints",
    "net.fetch": "net.web.fetch",
    "net.guard": "net.web.guard",
    "net.joint": "apps.joint",
    "net.link": "net.links.link net.links.interfaces net.links.reading",
    "net.noise": "net.links.records",
    "net.plain": "net.links.plain",
    "net.site": "net.web.site",
    "net.socks": "apps.socks",
    "net.strangers": "net.links.strangers",
    "net.stream": "net.streams.stream net.streams.address net.streams.carrier net.streams.outbox net.streams.producing",
    "net.unanswered": "net.web.unanswered",
    "noise.link": "noise.xk",
    "pending": "net.pending",
    "printable": "base.printable",
    "ranked": "base.ranked",
    "rmb.address": "rmb.twins.address",
    "rmb.cipher": "rmb.envelope.cipher",
    "rmb.delivery": "rmb.relay.delivery rmb.socket.confirm",
    "rmb.door": "rmb.socket.door",
    "rmb.envelope_pb2": "rmb.envelope.envelope_pb2",
    "rmb.federation": "rmb.relay.federation.forward rmb.relay.federation.asking rmb.relay.federation.offers",
    "rmb.frames": "rmb.socket.frames",
    "rmb.holdings": "rmb.relay.holdings",
    "rmb.identity": "rmb.twins.identity",
    "rmb.limiter": "rmb.relay.limiter",
    "rmb.metrics": "rmb.relay.metrics",
    "rmb.parking": "rmb.socket.parking",
    "rmb.poster": "rmb.relay.federation.post",
    "rmb.queues": "rmb.relay.queue.sqlite rmb.relay.queue.interface",
    "rmb.ranker": "rmb.relay.ranker",
    "rmb.redis_queue": "rmb.relay.queue.redis",
    "rmb.seal": "rmb.session.seal",
    "rmb.secrets": "rmb.twins.secrets",
    "rmb.server": "rmb.relay.server",
    "rmb.setup": "rmb.session.setup",
    "rmb.site": "rmb.relay.site",
    "rmb.slots": "rmb.relay.federation.slots",
    "rmb.switch": (
        "rmb.relay.switch rmb.relay.rounds rmb.relay.presence rmb.relay.lookups rmb.relay.limited rmb.relay.sessions"
    ),
    "rmb.token": "rmb.twins.token",
    "rmb.twin": "rmb.twins.twin",
    "rmb.uplink": "rmb.session.uplink",
    "rmb.websocket": "rmb.socket.websocket rmb.socket.upgrade rmb.socket.connect",
    "rmb.wire": "rmb.envelope.wire",
    "seldom": "base.seldom",
    "tables": "base.tables",
    "transport": "v2019",
    "transport.agreement": "v2019.core.agreement",
    "transport.client": "v2019.core.table",
    "transport.dial": "v2019.dial",
    "transport.events": "v2019.core.events",
    "transport.holdings": "v2019.holdings",
    "transport.kept": "v2019.core.kept",
    "transport.observe": "v2019.core.observe",
    "transport.owed": "v2019.core.owed",
    "transport.pings": "v2019.pings",
    "transport.policing": "v2019.core.policing base.policing",
    "transport.protocol": "v2019.protocol",
    "transport.relay": "v2019.core.relay v2019.core.routes v2019.core.congestion v2019.core.peers",
    "transport.secure": "v2019.core.secure v2019.core.resumption v2019.core.budget",
    "transport.server": "v2019.server",
    "transport.service": "v2019.client",
    "transport.session": "v2019.session v2019.incoming v2019.outgoing",
    "transport.state": "v2019.core.state",
    "transport.streams": "v2019.streams v2019.patience",
    "transport.strings": "v2019.strings",
    "transport.telemetry": "v2019.telemetry",
    "transport.unconfirmed": "v2019.unconfirmed",
    "transport.wire": "v2019.core.wire",
}
"""Old module -> new modules, the first that has a name counts; all below ``dmsg``."""
RENAMED = {
    "messaging.handshake.LinkHandshake": "messaging.core.handshake.JSONHandshake",
    "net.noise.NoiseClientEndpoint": "net.links.records.RecordClientEndpoint",
    "net.noise.NoiseLink": "net.links.records.RecordLink",
    "noise.link.LinkHandshake": "noise.xk.XKHandshake",
    "rmb.relay.Relay": "rmb.relay.rules.Rules",
    "transport.relay.Port": "v2019.core.peers.ConnectionPort",
}
"""What has another name, too."""


def forwarded(old: str, new: Sequence[str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that finds what the module had under its old name.

    :param new: the modules in which it is looked for.
    """

    def find(name: str) -> Any:
        if f"{old}.{name}".removeprefix("dmsg.") in MOVED:
            return import_module(f"{old}.{name}")
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        renamed = RENAMED.get(f"{old}.{name}".removeprefix("dmsg."))
        places = [f"{module}.{name}" for module in new] if renamed is None else [f"dmsg.{renamed}"]
        for place in places:
            module, _, now = place.rpartition(".")
            try:
                found = getattr(import_module(module), now)
            except AttributeError:
                continue
            warnings.warn(f"{old}.{name} is {place} now", DeprecationWarning, stacklevel=2)
            return found
        raise AttributeError(f"module {old!r} has no attribute {name!r}")

    return find


class _Old:
    """A loader that makes a module which has nothing of its own."""

    def __init__(self, new: Sequence[str]) -> None:
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, f"Moved to {', '.join(self._new)}.")

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = forwarded(module.__name__, self._new)


class _Finder:
    """Asked when there is no module of a name; not derived from ``importlib.abc``, whose import takes 15 ms."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if not fullname.startswith("dmsg."):
            return None
        new = MOVED.get(fullname.removeprefix("dmsg."))
        if new is None:
            return None
        # each may have modules below it, as `dmsg.transport` had
        old: Any = _Old([f"dmsg.{name}" for name in new.split()])
        return ModuleSpec(fullname, old, is_package=True)


def install() -> None:
    """Let old names be found; behind all that finds modules which are there."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        finder: Any = _Finder()
        sys.meta_path.append(finder)
