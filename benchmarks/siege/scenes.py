"""All scenes."""

from benchmarks.siege.bus import BusScene
from benchmarks.siege.checks import ChecksScene
from benchmarks.siege.client import ClientScene
from benchmarks.siege.codes import CodesScene
from benchmarks.siege.discovery import DiscoveryScene
from benchmarks.siege.memory import MemoryScene
from benchmarks.siege.messaging import MessagingScene
from benchmarks.siege.places import PlacesScene
from benchmarks.siege.receiver import ReceiverScene
from benchmarks.siege.relay import RelayScene
from benchmarks.siege.scene import Scene
from benchmarks.siege.serve import ServeScene

SCENES: dict[str, type[Scene]] = {
    "relay": RelayScene,
    "places": PlacesScene,
    "client": ClientScene,
    "serve": ServeScene,
    "receiver": ReceiverScene,
    "memory": MemoryScene,
    "messaging": MessagingScene,
    "bus": BusScene,
    "discovery": DiscoveryScene,
    "checks": ChecksScene,
    "codes": CodesScene,
}
"""Scenes by their names in the table."""
