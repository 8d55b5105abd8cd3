"""Lab of hosts on network bridges (Linux, root). Unlike the lab in :mod:`dmsg.testing.namespaces`, its networks forward
multicast packets.

.. code-block:: python

    with BridgeLab({"home": ["alice", "bob"], "office": ["bob", "carol"]}) as lab:
        lab.run("alice", "dmsg", "send", "--lan", "only", "film.mkv")
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence

from dmsg.testing.namespaces import START_TIMEOUT, LabError, Namespaces

SWITCH = "switch"
"""Name of the host that has a bridge for each network. No other host may have this name."""


class BridgeLab(Namespaces):
    """Lab of network namespaces, one for each host. A host is in one or several networks.

    :param networks: hosts of each network, by name.
    :param ipv4: whether hosts have IPv4 addresses. Without them, hosts have only IPv6 link-local addresses.
    :ivar addresses: IPv4 address of each host on each network, by network and host.
    """

    def __init__(self, networks: Mapping[str, Sequence[str]], *, ipv4: bool = True) -> None:
        hosts = dict.fromkeys(host for members in networks.values() for host in members)
        super().__init__([SWITCH, *hosts])
        self._networks = networks
        self._ipv4 = ipv4
        self.addresses = {
            (network, host): f"10.78.{number}.{place}"
            for number, (network, members) in enumerate(networks.items(), 1)
            for place, host in enumerate(members, 1)
        }

    def _connect(self) -> None:
        for host in self.hosts:
            self._ip(host, "link set lo up")
        for network, members in self._networks.items():
            self._ip(SWITCH, f"link add {network} type bridge mcast_snooping 0")
            self._ip(SWITCH, f"link set {network} up")
            for place, host in enumerate(members):
                end = f"{network[:8]}-{place}"
                self._ip(SWITCH, f"link add {end} type veth peer name {network} netns {self._namespace(host)}")
                self._ip(SWITCH, f"link set {end} master {network} up")
                # Duplicate address detection is off: it would delay the addresses, and there are no other hosts in
                # these networks.
                self.set_network_option(host, f"net.ipv6.conf.{network}.accept_dad", "0")
                if self._ipv4:
                    self._ip(host, f"addr add {self.addresses[network, host]}/24 dev {network}")
                self._ip(host, f"link set {network} up")
        self._wait_for_addresses()

    def _wait_for_addresses(self) -> None:
        """Wait until the kernel has assigned a link-local address to each host on each of its networks."""
        until = time.monotonic() + START_TIMEOUT
        for network, members in self._networks.items():
            for host in members:
                while not self.link_local(network, host):
                    if time.monotonic() > until:
                        raise LabError(f"{host} has no address of IPv6 on {network}")
                    time.sleep(0.02)

    def link_local(self, network: str, host: str) -> str:
        """Return the link-local address of a host on a network; an empty text while the host has none."""
        found = json.loads(self._ip(host, f"-j -6 addr show dev {network} scope link"))
        return next((one["local"] for entry in found for one in entry.get("addr_info", ())), "")

    def _ip(self, host: str, arguments: str) -> str:
        """Run ``ip`` in the namespace of a host, and return its output."""
        command = ["ip", "-n", self._namespace(host), *arguments.split()]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def unplug(self, network: str, host: str) -> None:
        """Disconnect a host from a network."""
        self._ip(host, f"link set {network} down")

    def plug(self, network: str, host: str) -> None:
        """Reconnect a host to a network."""
        self._ip(host, f"link set {network} up")
