"""All scenes."""

from benchmarks.siege.bus import BusScene
from benchmarks.siege.client import ClientScene
from benchmarks.siege.discovery import DiscoveryScene
from benchmarks.siege.messaging import MessagingScene
from benchmarks.siege.relay import RelayScene
from benchmarks.siege.scene import Scene

SCENES: dict[str, type[Scene]] = {
    "relay": RelayScene,
    "client": ClientScene,
    "messaging": MessagingScene,
    "bus": BusScene,
    "discovery": DiscoveryScene,
}
"""By what the table calls them."""
