"""Settings of a server that an operator can change; all protocol families share them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from random import Random

from dmsg.base.options import LIMITS, NETWORK, SECONDS, Number, Text, checked_by, option
from dmsg.base.urls import URL
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.net.addresses import parse_address
from dmsg.net.carriers.names import Carrier, parse_carrier
from dmsg.pages.settings import PageSettings
from dmsg.servers.admission import Admission


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(PageSettings):
    """Settings of a server, of any protocol family.

    If ``public_address`` is None, clients get the address of the first listening port, so this port must listen on one
    address only. ``discovery`` may also be a client of discoveries (:class:`~dmsg.discovery.lookup.lookups.Lookups`).
    If it is empty, the server is not registered. In the Messaging System, channels cannot move to another server, so
    ``drain_timeout`` is the time after which they are closed.

    :ivar admission: admission policy; None to admit everybody.
    :ivar random: random numbers for the jitter of retries; None for those of the operating system.
    """

    public_address: str | None = option(
        None,
        "HOST:PORT at which clients reach this server",
        Text("HOST:PORT", checked_by(parse_address)),
        group=NETWORK,
    )
    carriers: Sequence[Carrier] = option(
        (),
        "Port of the public host at which clients also reach this server, by TLS with a websocket (wss) or without one "
        "(tls); repeatable",
        Text("wss:PORT or tls:PORT", parse_carrier),
        name="carrier",
        repeated=True,
        group=NETWORK,
    )
    trusted_proxies: Sequence[IPv4Network | IPv6Network] = option(
        (),
        "Address or network of a reverse proxy that adds the client's address to X-Forwarded-For; repeatable",
        Text("ADDRESS[/BITS]", ip_network),
        name="trusted-proxy",
        repeated=True,
        group=NETWORK,
    )
    proxy_protocol: Sequence[IPv4Network | IPv6Network] = option(
        (),
        "Address or network of a proxy whose connections begin with a header of the PROXY protocol; repeatable",
        Text("ADDRESS[/BITS]", ip_network),
        name="proxy-protocol",
        repeated=True,
        group=NETWORK,
    )
    discovery: Sequence[str] | Lookups = option(
        (), "URL of a discovery to register with; repeatable", URL, repeated=True, group=NETWORK
    )
    admission: Admission | None = None
    drain_timeout: float = option(
        8.0, "Seconds to wait at shutdown until clients have moved to other servers", SECONDS, group=NETWORK
    )
    memory: int | None = option(
        None,
        "MiB to buffer for all slow clients together",
        Number(1, 2**20, "MiB"),
        default_text="a quarter of the machine's memory",
        group=LIMITS,
    )
    random: Random | None = None


DEFAULTS = ServerSettings()
