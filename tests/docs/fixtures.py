"""Fixtures that a page may ask for at its beginning, as in ``<!-- page: network alice -->``."""

from __future__ import annotations

from tests.docs.blocks import Command
from tests.docs.needs import CLONE
from tests.docs.person import Person

NETWORK = (
    "twistd -n --pidfile= dmsg-discovery --listen tcp:9090:interface=127.0.0.1 --store memory:",
    "twistd -n --pidfile= dmsg-server --listen tcp:8080:interface=127.0.0.1 --discovery http://127.0.0.1:9090"
    " --key-file s1.key --create --metrics tcp:9100:interface=127.0.0.1",
    "twistd -n --pidfile= dmsg-server --listen tcp:8081:interface=127.0.0.1 --discovery http://127.0.0.1:9090"
    " --key-file s2.key --create --metrics tcp:9101:interface=127.0.0.1",
    "export DMSG_DISCOVERY=http://127.0.0.1:9090",
)
BUS = (
    "redis-server --port 6379 --bind 127.0.0.1 --save ''",
    "redis-server --port 6380 --bind 127.0.0.1 --save ''",
    "twistd -n --pidfile= rmb-registry --listen tcp:9091:interface=127.0.0.1 --store memory:",
    "twistd -n --pidfile= rmb-relay --listen tcp:8081:interface=127.0.0.1 --domain http://127.0.0.1:8081"
    " --registry http://127.0.0.1:9091 --queue sqlite:relay.sqlite",
    "export RMB_REGISTRY=http://127.0.0.1:9091 RMB_RELAY=ws://127.0.0.1:8081",
    "dmsg twin create alice.twin",
    "dmsg twin create bob.twin",
    "twistd -n --pidfile= rmb-peer --key-file alice.twin --registry http://127.0.0.1:9091"
    " --relay ws://127.0.0.1:8081 --redis redis://127.0.0.1:6379",
    "twistd -n --pidfile= rmb-peer --key-file bob.twin --registry http://127.0.0.1:9091"
    " --relay ws://127.0.0.1:8081 --redis redis://127.0.0.1:6380",
)


def set_up(person: Person, fixtures: tuple[str, ...]) -> None:
    """Start the fixtures that a page asks for.

    :param fixtures: ``network``, ``bus``, or any other word, which becomes a name in the address book with a key file
        of that name.
    :raises Unexpected: a fixture does not start.
    """
    for fixture in fixtures:
        commands: tuple[str, ...]
        if fixture == "network":
            commands = NETWORK
        elif fixture == "bus":
            # The reader of the page has followed the overview, which begins with this command.
            commands = ("pip install -e '.[rmb]'", *BUS) if CLONE else BUS
        else:
            key_file = f"{fixture}.key"
            commands = (f"dmsg key new {key_file}", f"dmsg name add {fixture} $(dmsg key show {key_file})")
        for text in commands:
            person.type(Command("", text))
