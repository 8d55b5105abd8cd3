"""``python -m benchmarks.siege.honest NUMBER``: runs servers that prove their keys and do nothing else."""

from __future__ import annotations

import selectors
import socket
import sys

from dmsg.errors import HandshakeError
from dmsg.keys import SecKey
from dmsg.noise.xk import XKHandshake


def key_of(number: int) -> SecKey:
    """The key of the server of that number."""
    return SecKey.from_seed(b"honest server %d" % number)


def main(number: int) -> None:
    """Serve for ever: each server at a port of its own, on all addresses; say the ports in one line."""
    selector = selectors.DefaultSelector()
    ports = []
    for each in range(number):
        listener = socket.create_server(("0.0.0.0", 0))
        ports.append(listener.getsockname()[1])
        selector.register(listener, selectors.EVENT_READ, key_of(each))
    print("ports", *ports, flush=True)
    while True:
        for ready, _ in selector.select():
            one = ready.fileobj
            assert isinstance(one, socket.socket)
            if isinstance(ready.data, SecKey):
                connection, _ = one.accept()
                selector.register(connection, selectors.EVENT_READ, XKHandshake(ready.data))
                continue
            try:
                data = one.recv(4096)
                if data:
                    ready.data.receive_data(data)
                    one.sendall(ready.data.data_to_send())
            except (OSError, HandshakeError):
                data = b""
            if not data:
                selector.unregister(one)
                one.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
