"""All scenes."""

from benchmarks.siege.bus import BusScene
from benchmarks.siege.client import ClientScene
from benchmarks.siege.discovery import DiscoveryScene
from benchmarks.siege.messaging import MessagingScene
from benchmarks.siege.places import PlacesScene
from benchmarks.siege.relay import RelayScene
from benchmarks.siege.scene import Scene
from benchmarks.siege.serve import ServeScene

SCENES: dict[str, type[Scene]] = {
    "relay": RelayScene,
    "places": PlacesScene,
    "client": ClientScene,
    "serve": ServeScene,
    "messaging": MessagingScene,
    "bus": BusScene,
    "discovery": DiscoveryScene,
}
"""By what the table calls them."""
