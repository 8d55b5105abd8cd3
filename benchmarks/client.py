"""End to end through the client API: a process that sends, a process that receives, a relay."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import CIPHER, Entity, aead, away, start_server, tcp_echo

SIZES = (64, 1024, 16 * 1024, 60_000)
SECONDS = 1.5
IN_FLIGHT = 64


def _child(role: str, arguments: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.client", role, json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def client_rows() -> list[dict[str, Any]]:
    """Acknowledged messages, 1 and 8 pairs, and the round trip of an echo."""
    rows = []
    server, (host, port), key = start_server(core=away())
    with server:
        plain: dict[tuple[int, int], float] = {}
        for pairs, secure in ((1, False), (1, True), (8, False), (8, True)):
            where = {"host": host, "port": port, "server": key.hex(), "pairs": pairs, "secure": secure}
            receiver = _child("receive", where)
            assert receiver.stdout is not None
            where["keys"] = json.loads(receiver.stdout.readline())
            before = server.cpu()
            sender = _child("send", where)
            out, _ = sender.communicate(timeout=120)
            receiver.terminate()
            receiver.wait()
            for line in out.splitlines():
                row = {"pairs": pairs, "secure": secure, **json.loads(line)}
                if "size" in row:
                    if secure:
                        row["of_plain"] = row["per_second"] / plain[pairs, row["size"]]
                    else:
                        plain[pairs, row["size"]] = row["per_second"]
                    # The limit is the cost of sealing the message and opening the ACK, which a sender has to do.
                    limit = (aead(row["size"] + 7) + aead(7)) / 2
                    row["aead_us"] = limit * 1e6
                    row["share_of_aead"] = limit * row["per_sender_cpu_second"]
                else:
                    # Each of the two directions passes two hops.
                    row["tcp_echo_ms"] = 2 * tcp_echo() * 1e3
                    row["share_of_tcp"] = row["tcp_echo_ms"] / row["p50_ms"]
                rows.append(row)
            rows[-1]["relay_cpu_s"] = server.cpu() - before
            if pairs == 1:
                rows.append({"secure": secure, **_one_at_a_time(server, where)})
    return rows


def _one_at_a_time(server: Entity, where: dict[str, Any]) -> dict[str, Any]:
    """Measure sends, each of which waits for the acknowledgement of the previous one. Waking up costs more than
    carrying the data.
    """
    receiver = _child("receive", where)
    assert receiver.stdout is not None
    where["keys"] = json.loads(receiver.stdout.readline())
    before = server.cpu()
    out, _ = _child("one", where).communicate(timeout=120)
    used = server.cpu() - before
    receiver.terminate()
    receiver.wait()
    row: dict[str, Any] = json.loads(out)
    # The CPU time includes a connection and a transport, which cost 1 ms in total.
    row["relay_cpu_us"] = used / row["one_at_a_time"] * 1e6
    return row


# --- the children ---


async def _session(reactor: Any, turn: Any, where: dict[str, Any], factory: Any) -> Any:
    from twisted.internet.endpoints import TCP4ClientEndpoint

    from dmsg.base.cipher_names import Cipher
    from dmsg.keys import PubKey, SecKey
    from dmsg.net.links.connect import LinkClientEndpoint
    from dmsg.net.links.records import record_links
    from dmsg.v2019.session import ClientSession
    from dmsg.v2019.transport_streams import TransportStreams

    key = SecKey.generate()
    streams = None
    if where["secure"]:
        streams = TransportStreams(reactor, key, lambda port: factory, turn.add_stream, cipher=CIPHER)
    endpoint = TCP4ClientEndpoint(reactor, where["host"], where["port"])
    make_link = record_links(reactor, turn, key, PubKey.from_hex(where["server"]), aes_gcm=CIPHER is Cipher.AES_256_GCM)
    noise = LinkClientEndpoint(reactor, endpoint, make_link)
    session = await noise.connect(
        lambda remote: ClientSession(reactor, turn, key.public, remote, accept=lambda: factory, streams=streams)
    )
    await session.established
    return key, session


async def _receive(reactor: Any, where: dict[str, Any]) -> None:
    from twisted.internet.defer import Deferred
    from twisted.internet.protocol import Factory, Protocol

    from dmsg.net.flush import TurnFlush

    class EchoIfAsked(Protocol):
        """Send back messages that start with E, and discard all others."""

        def dataReceived(self, data: bytes) -> None:
            if data[:1] == b"E":
                assert self.transport is not None
                self.transport.write(data)

    turn = TurnFlush(reactor)
    keys = [
        (await _session(reactor, turn, where, Factory.forProtocol(EchoIfAsked)))[0].public.hex()
        for _ in range(where["pairs"])
    ]
    print(json.dumps(keys), flush=True)
    await Deferred()


async def _one(reactor: Any, where: dict[str, Any]) -> None:
    from twisted.internet.protocol import Factory, Protocol

    from dmsg.keys import PubKey
    from dmsg.net.flush import TurnFlush

    _, session = await _session(reactor, TurnFlush(reactor), where, None)
    protocol = await session.open(
        PubKey.from_hex(where["keys"][0]), Factory.forProtocol(Protocol), secure=where["secure"]
    )
    times = []
    began, until = cpu_seconds(), time.perf_counter() + 2 * SECONDS
    while (start := time.perf_counter()) < until:
        await protocol.transport.send(bytes(64))
        times.append(time.perf_counter() - start)
    used = cpu_seconds() - began
    times.sort()
    print(
        json.dumps(
            {
                "one_at_a_time": len(times),
                "p50_us": times[len(times) // 2] * 1e6,
                "p99_us": times[int(len(times) * 0.99)] * 1e6,
                "sender_cpu_us": used / len(times) * 1e6,
            }
        ),
        flush=True,
    )


async def _send(reactor: Any, where: dict[str, Any]) -> None:
    from twisted.internet.defer import Deferred, gatherResults
    from twisted.internet.protocol import Factory, Protocol

    from dmsg.cli.peers.bench_run import measure
    from dmsg.keys import PubKey
    from dmsg.net.flush import TurnFlush

    class Echo(Protocol):
        answered: Any = None

        def dataReceived(self, data: bytes) -> None:
            answered, self.answered = self.answered, None
            if answered is not None:
                answered.callback(None)

    turn = TurnFlush(reactor)
    protocols: list[Any] = []
    for key in where["keys"]:
        _, session = await _session(reactor, turn, where, None)
        factory = Factory.forProtocol(Echo)
        protocols.append(await session.open(PubKey.from_hex(key), factory, secure=where["secure"]))
    for size in SIZES:
        before = cpu_seconds()
        results = await gatherResults(
            [Deferred.fromCoroutine(measure(reactor, one.transport, size, SECONDS, IN_FLIGHT)) for one in protocols]
        )
        cpu = cpu_seconds() - before
        messages = sum(count for count, _ in results)
        seconds = max(took for _, took in results)
        row = {
            "size": size,
            "in_flight": IN_FLIGHT,
            "per_second": messages / seconds,
            "megabytes_per_second": messages * size / seconds / 1e6,
            "per_sender_cpu_second": messages / cpu,
        }
        print(json.dumps(row), flush=True)
    protocol = protocols[0]
    times = []
    for _ in range(2000):
        protocol.answered = Deferred()
        start = time.perf_counter()
        protocol.transport.write(b"E" + bytes(63))
        await protocol.answered
        times.append(time.perf_counter() - start)
    times.sort()
    print(
        json.dumps({"echo": 64, "p50_ms": times[1000] * 1e3, "p99_ms": times[1980] * 1e3}),
        flush=True,
    )


def cpu_seconds() -> float:
    """Return the seconds of the processor that this process has used."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _main() -> None:
    from twisted.internet.defer import Deferred
    from twisted.internet.task import react

    role, where = sys.argv[1], json.loads(sys.argv[2])
    main = {"receive": _receive, "send": _send, "one": _one}[role]
    react(lambda reactor: Deferred.fromCoroutine(main(reactor, where)))


if __name__ == "__main__":
    _main()
