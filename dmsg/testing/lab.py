"""Lab with a complete dmsg network in memory: discovery, servers and clients, each on a separate host.

The entities are the real ones and not mock objects. They only use :mod:`dmsg.testing.network` instead of the kernel's
network.

.. code-block:: python

    lab = Lab(seed=1)
    lab.add_servers(2)
    alice, bob = lab.add_client("alice"), lab.add_client("bob")
    lab.settle()
    bob.listen(factory, 7)
    opening = alice.connect(bob.public_key, other_factory, port=7)
    lab.network.run_until(lambda: opening.called)
    lab.network.host("server-1").kill()
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from treq.client import HTTPClient
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.python.failure import Failure
from twisted.web.client import URI, Agent
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from dmsg.base.cipher_names import Cipher
from dmsg.base.memory import Memory
from dmsg.clients.server_choice import ServerChoiceOptions
from dmsg.discovery.lookup.lookup import TIMEOUT, Lookup
from dmsg.discovery.lookup.lookups import Lookups
from dmsg.discovery.service.service import Discovery
from dmsg.discovery.service.settings import DiscoverySettings
from dmsg.keys import SecKey
from dmsg.messaging.proofs import OPENINGS
from dmsg.net.socket_endpoints import TCPEndpoint
from dmsg.net.web.fetch import Body, make_pool
from dmsg.servers.settings import ServerSettings
from dmsg.testing.determinism import Determinism, Trace
from dmsg.testing.lab_clock import LabClock
from dmsg.testing.network import Host, Network
from dmsg.testing.old_relay import make_old
from dmsg.v2019.client import Client
from dmsg.v2019.core.policing import Limits
from dmsg.v2019.server import Server
from dmsg.v2019.transport_streams import Encryption

DISCOVERY_PORT = 9090
SERVER_PORT = 8080


@implementer(IAgentEndpointFactory)
class _Endpoints:
    def __init__(self, host: Host) -> None:
        self._host = host

    def endpointForURI(self, uri: URI) -> TCPEndpoint:
        return TCPEndpoint(self._host, uri.host.decode(), uri.port, TIMEOUT)


class ClientOptions(ServerChoiceOptions, total=False):
    """Options of a client of a lab. :class:`~dmsg.v2019.client.Client` explains them."""

    encryption: str | Encryption
    resume_timeout: float
    receipts: bool
    cipher: str


class Lab:
    """Network of entities in memory.

    Random events of the network and the keys of the entities are derived from the seed. Ids, tokens and dates come from
    the operating system, except in :func:`repeatable_lab`.

    :param seed: seed of the keys and of all random events of the network.
    :param trace: trace that records all events between the hosts.
    :param clock: clock of all hosts; None for a new one.
    :ivar old_servers: names of the servers that follow the rules of 2019 when they are started.
    """

    def __init__(self, seed: int = 0, *, trace: Trace | None = None, clock: Clock | None = None) -> None:
        self.seed = seed
        self.network = Network(seed, trace, clock)
        self.clock = self.network.clock
        self.random = self.network.random
        self.discovery: Discovery | None = None
        self._discoveries = ["discovery"]
        """Names of the hosts of the discoveries that new entities use."""
        self._keys: dict[str, SecKey] = {}
        self.servers: dict[str, Server] = {}
        self.old_servers: set[str] = set()
        self.clients: dict[str, Client] = {}
        self.start_discovery()

    def key(self, name: str) -> SecKey:
        """Return the secret key of an entity, which is derived from its name and the seed."""
        if name not in self._keys:
            # Walks ask for keys thousands of times.
            self._keys[name] = SecKey.from_seed(hashlib.sha256(f"{self.seed} {name}".encode()).digest())
        return self._keys[name]

    def lookups(self, host: Host) -> Lookups:
        """Return a client of discovery that connects from a host."""
        pool = make_pool(host, persistent=False)
        agent = Agent.usingEndpointFactory(host, _Endpoints(host), pool=pool)
        # HTTPClient's default body producer uses the global reactor, so another one is passed.
        http = HTTPClient(agent, data_to_body_producer=Body)
        urls = [f"http://{self.network.host(name).address}:{DISCOVERY_PORT}" for name in self._discoveries]
        return Lookups([Lookup(host, url, http=http) for url in urls])

    def start_discovery(self, store: str = "memory:") -> Discovery:
        """Start a discovery on the host ``discovery``. All entities use this discovery.

        :param store: its store, in the form of the option ``--store`` of ``dmsg discovery``.
        """
        self.discovery = self._start_discovery("discovery", store)
        return self.discovery

    def add_discovery(self, name: str) -> Discovery:
        """Start another discovery of the same network, or start it again after it was killed. Entities that are started
        later use it, too.

        :param name: name of its host.
        """
        if name not in self._discoveries:
            self._discoveries.append(name)
        return self._start_discovery(name, "memory:")

    def _start_discovery(self, name: str, store: str) -> Discovery:
        host = self.network.host(name)
        host.revive()
        discovery = Discovery(
            host.reactor,
            [f"tcp:{DISCOVERY_PORT}:interface={host.address}"],
            store,
            DiscoverySettings(rate=0, max_servers=1000, openings=OPENINGS),
            random=self.random,  # The order of the servers that discovery returns must depend only on the seed, too.
        )
        with host.running():
            discovery.startService()
        return discovery

    def add_server(self, name: str, *, limits: Limits | None = None) -> Server:
        """Start a server on the host of that name. The host may have been killed before."""
        host = self.network.host(name)
        host.revive()
        server = Server(
            host.reactor,
            self.key(name),
            [f"tcp:{SERVER_PORT}:interface={host.address}"],
            ServerSettings(
                public_address=f"{host.address}:{SERVER_PORT}", discovery=self.lookups(host), random=self.random
            ),
            limits=limits,
            cipher=Cipher.AES_256_GCM.value,
        )
        if name in self.old_servers:
            make_old(server)
        with host.running():
            server.startService()
        self.servers[name] = server
        return server

    def add_servers(self, count: int) -> list[Server]:
        """Start ``count`` servers, on the hosts ``server-1``, ``server-2`` and so on."""
        return [self.add_server(f"server-{number}") for number in range(1, count + 1)]

    def add_client(self, name: str, *, key: SecKey | None = None, **options: Unpack[ClientOptions]) -> Client:
        """Start a client on the host of that name.

        :param key: secret key of the client; None for the key that is derived from the name.
        """
        host = self.network.host(name)
        # The cipher is fixed. By default, the client would measure which cipher is faster on this processor, so a run
        # could not be repeated on another machine.
        options.setdefault("cipher", Cipher.AES_256_GCM.value)
        client = Client(
            host.reactor,
            key or self.key(name),
            self.lookups(host),
            random=self.random,
            # In the account that all clients of a process share, a killed client would stay until this process ends.
            memory=Memory(),
            **options,
        )
        with host.running():
            client.startService()
        self.clients[name] = client
        return client

    def settle(self, timeout: float = 60.0) -> None:
        """Advance the clock until the entries of all clients are published.

        :param timeout: maximum seconds of the lab's time.
        :raises AssertionError: this takes longer.
        """
        published = [client.when_published() for client in self.clients.values()]
        for deferred in published:
            deferred.addErrback(lambda _: None)
        self.network.run_until(lambda: all(deferred.called for deferred in published), timeout)

    def kill(self, name: str) -> None:
        """Kill the entity on a host, like ``kill -9``."""
        self.network.host(name).kill()
        self.servers.pop(name, None)
        self.clients.pop(name, None)

    def leave(self, name: str) -> None:
        """Stop a server in an orderly way, so that it drains."""
        self.servers.pop(name).stopService()

    def result(self, deferred: Deferred[Any], timeout: float = 60.0) -> Any:
        """Advance the clock until a Deferred fires. Return its result or raise its failure."""
        results: list[object] = []
        deferred.addBoth(results.append)
        self.network.run_until(lambda: results, timeout)
        (result,) = results
        if isinstance(result, Failure):
            result.raiseException()
        return result

    def stop(self) -> None:
        """Stop all services in an orderly way."""
        stopping = [client.stopService() for client in self.clients.values()]
        stopping += [server.stopService() for server in self.servers.values()]
        done = [False] * len(stopping)

        def finished(_: object, number: int) -> None:
            done[number] = True

        for number, one in enumerate(stopping):
            one.addBoth(finished, number)
        self.network.run_until(lambda: all(done), 60)


@contextmanager
def repeatable_lab(seed: int = 0, *, trace: Trace | None = None) -> Iterator[Lab]:
    """Context manager with a lab whose runs can be repeated: the same seed results in the same run, byte for byte, even
    in another process and with another version of Python.

    Until the context ends, the lab is the source of random numbers and time for the whole process
    (:class:`~dmsg.testing.determinism.Determinism`).
    """
    clock = LabClock()
    with Determinism(seed, clock) as sources:
        lab = Lab(seed, trace=trace, clock=clock)
        sources.ahead = lab.network.ahead
        yield lab
