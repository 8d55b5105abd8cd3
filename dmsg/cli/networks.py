"""Networks that the user has joined.  The configuration file gives each a name, which stands for the URL of its
discovery.

``dmsg join`` writes a table ``[networks.NAME]``.  Commands accept the name wherever they accept the URL of a discovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dmsg.base.urls import check_url
from dmsg.cli.config_file import NETWORKS, ConfigError, config_path, read_config


class NoSuchNetwork(ConfigError):
    """Error: the user has joined no network of this name."""


@dataclass(frozen=True, slots=True)
class Network:
    """Network that the user has joined.

    :ivar name: name of the network in the configuration file.
    :ivar discovery: URL of its discovery.
    :ivar server: public key of the server in its invitation; empty if a person wrote the table without it.
    """

    name: str
    discovery: str
    server: str = ""


def joined_networks(content: Mapping[str, object] | None = None) -> dict[str, Network]:
    """Return the networks in the configuration file, by name.

    :param content: content of the file; None to read it.
    :raises ConfigError: a table does not describe a network.
    """
    tables = (read_config() if content is None else content).get(NETWORKS, {})
    if not isinstance(tables, dict):
        raise ConfigError(f"{config_path()}: [{NETWORKS}] needs a table for each network")
    return {name: _network(name, table) for name, table in tables.items()}


def find_network(name: str) -> Network:
    """Return the network that the user has joined under this name.

    :raises NoSuchNetwork: there is no such network.
    :raises ConfigError: the configuration file cannot be used.
    """
    networks = joined_networks()
    if name not in networks:
        known = ", ".join(sorted(networks)) or "none"
        raise NoSuchNetwork(
            f"there is no network {name[:80]!r} (joined: {known}); a URL begins with http:// or https://"
        )
    return networks[name]


def _network(name: str, table: object) -> Network:
    where = f"{config_path()}: [{NETWORKS}.{name}]"
    if not isinstance(table, dict) or not isinstance(table.get("discovery"), str):
        raise ConfigError(f"{where} needs a setting 'discovery' with a URL")
    unknown = sorted(table.keys() - {"discovery", "server"})
    if unknown:
        raise ConfigError(f"{where} has no setting {unknown[0]!r}, only discovery and server")
    try:
        return Network(name, check_url(table["discovery"]), str(table.get("server", "")))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
