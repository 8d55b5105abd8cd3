"""The least that a connection costs a Twisted server that has to believe a signature: the anchor of the connects."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

from benchmarks.machine import away, cores, cpu_of

REQUEST = b"G" * 500
"""Request as long as a twin's upgrade."""


def serve() -> None:
    """Take a read, check an ed25519 signature as the relay does, answer, be closed; nothing else."""
    from nacl.signing import SigningKey
    from twisted.internet import protocol, reactor

    key = SigningKey.generate()
    message = b"x" * 150
    signature = key.sign(message).signature

    class Bare(protocol.Protocol):
        def dataReceived(self, data: bytes) -> None:
            key.verify_key.verify(message, signature)
            transport: Any = self.transport
            transport.setTcpNoDelay(True)
            transport.write(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")

    factory = protocol.Factory.forProtocol(Bare)
    factory.noisy = False
    listen: Any = reactor.listenTCP
    port = listen(0, factory, interface="127.0.0.1")
    print(port.getHost().port, flush=True)
    reactor.run()


def bare_connects(number: int) -> float:
    """Return the CPU seconds of the bare server for one of ``number`` successive connections."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bare"], stdout=subprocess.PIPE)
    try:
        core = away()
        if core is not None and len(cores()) > 1:
            os.sched_setaffinity(process.pid, {core})
        assert process.stdout is not None
        port = int(process.stdout.readline())

        def connect() -> None:
            with socket.create_connection(("127.0.0.1", port)) as one:
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                one.sendall(REQUEST)
                one.recv(100)

        for _ in range(200):
            connect()
        time.sleep(0.2)
        before = cpu_of(process.pid)
        for _ in range(number):
            connect()
        time.sleep(0.2)
        return (cpu_of(process.pid) - before) / number
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve()
