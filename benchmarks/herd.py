"""Requests of a network to discovery and to the remaining servers when a large part leaves or returns.

The entities are those of real networks, in the lab of :mod:`dmsg.testing`, with their real waiting times. So the
numbers per second grow in proportion to the number of clients, which arithmetic alone does not show.

The entities are those that run elsewhere, in the lab of :mod:`dmsg.testing`, with the waits that they really have; so
their numbers by the second hold for any number of clients in proportion, which arithmetic alone does not tell.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from benchmarks.report import show
from dmsg.testing import Lab

CLIENTS = 40
SERVERS = 4
WATCHED = 180
"""Seconds after the event."""
AWAY = 300
"""Seconds for which discovery is away."""


def wait(lab: Lab, seconds: float) -> None:
    """Run the lab for ``seconds`` of its time."""
    until = lab.clock.seconds() + seconds
    lab.network.run_until(lambda: lab.clock.seconds() >= until, 2.0 * seconds + 5.0)


class Watch:
    """Counts what is asked, second by second of the lab."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._before: Counter[str] = Counter()
        self.seconds: list[Counter[str]] = []

    def _now(self) -> Counter[str]:
        found: Counter[str] = Counter()
        discovery = self._lab.discovery
        if discovery is not None:
            for metric in discovery.metrics.requests.collect():
                for sample in metric.samples:
                    if sample.name.endswith("_total"):
                        found[sample.labels["path"]] += int(sample.value)
        for server in self._lab.servers.values():
            found["connections"] += server.factory.connections_opened
        return found

    def run(self, seconds: int) -> None:
        """Run the lab for ``seconds``, and record the requests of each second."""
        self._before = self._now()
        for _ in range(seconds):
            wait(self._lab, 1.0)
            now = self._now()
            self.seconds.append(now - self._before)
            self._before = now

    def row(self, event: str, affected: int) -> dict[str, Any]:
        """Return the requests of each affected client: in all, and in the busiest second."""
        asked = [sum(one.values()) - one["connections"] for one in self.seconds]
        connects = [one["connections"] for one in self.seconds]
        half = next((n + 1 for n in range(len(connects)) if sum(connects[: n + 1]) >= affected / 2), None)
        return {
            "event": event,
            "clients_hit": affected,
            "requests_each": sum(asked) / affected,
            "requests_each_in_worst_second": max(asked) / affected,
            "worst_second": asked.index(max(asked)) + 1,
            "requests_each_after_a_minute": sum(asked[60:]) / max(1, len(asked) - 60) * 60 / affected,
            "connects_each": sum(connects) / affected,
            "connects_each_in_worst_second": max(connects) / affected,
            "half_are_back_after_s": half,
        }


def network(clients: int, servers: int = SERVERS, **options: Any) -> Lab:
    """Return a network whose clients have been connected for a while."""
    lab = Lab(seed=1)
    lab.add_servers(servers)
    for number in range(clients):
        lab.add_client(f"client-{number}", **options)
    lab.settle(300.0)
    wait(lab, 60.0)
    return lab


def a_server_dies(clients: int) -> dict[str, Any]:
    """Kill one of four servers."""
    lab = network(clients)
    hit = len(lab.servers["server-1"].factory.sessions)
    watch = Watch(lab)
    lab.kill("server-1")
    watch.run(WATCHED)
    return watch.row(f"a server of {SERVERS} dies", hit)


def a_quiet_minute(clients: int) -> dict[str, Any]:
    """Measure the requests of each client while nothing happens."""
    lab = network(clients)
    watch = Watch(lab)
    watch.run(WATCHED)
    return watch.row("nothing", clients)


def all_start_at_once(clients: int) -> dict[str, Any]:
    """Start all clients at once, as after a power cut that the servers survived."""
    lab = Lab(seed=1)
    lab.add_servers(SERVERS)
    wait(lab, 30.0)
    watch = Watch(lab)
    for number in range(clients):
        lab.add_client(f"client-{number}")
    watch.run(WATCHED)
    return watch.row("all start in one second", clients)


def discovery_comes_back(clients: int) -> dict[str, Any]:
    """Return discovery after five minutes, without any entries."""
    lab = network(clients)
    lab.network.host("discovery").kill()
    lab.discovery = None
    wait(lab, AWAY)
    lab.network.host("discovery").revive()
    lab.start_discovery()
    watch = Watch(lab)
    watch.run(WATCHED)
    return watch.row(f"discovery is back after {AWAY} s", clients)


EVENTS = (a_quiet_minute, a_server_dies, all_start_at_once, discovery_comes_back)


def herd_rows(clients: int = CLIENTS) -> list[dict[str, Any]]:
    """Return the rows of all events, each in a network of its own."""
    return [event(clients) for event in EVENTS]


def main() -> None:
    """Run the benchmark for more clients than ``make bench`` does."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.herd", description=__doc__)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    show("what is asked of discovery and servers", herd_rows(parser.parse_args().clients))


if __name__ == "__main__":
    main()
