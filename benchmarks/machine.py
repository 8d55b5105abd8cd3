"""Processes under test, and what this machine can do at most."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dmsg.base.cipher_names import AUTO, Cipher
from dmsg.keys import PubKey, SecKey
from dmsg.net.cipher_choice import preferred_cipher
from dmsg.noise.ciphers import begin_cipher

START_TIMEOUT = 30.0
CIPHER = preferred_cipher(os.environ.get("DMSG_BENCH_CIPHER", AUTO))
"""Cipher of connections, of transports and of the limit beside them; the variable forces one."""
PR_SET_PDEATHSIG = 1

# If malloc returned the memory to the system each time, larger reads and writes would cost ten times more.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4194304",
    "MALLOC_TRIM_THRESHOLD_": "16777216",
    "MALLOC_TOP_PAD_": "1048576",
}


_CORES = sorted(os.sched_getaffinity(0))


def cores() -> list[int]:
    """The cores that this process could use before it was pinned to one."""
    return _CORES


def away() -> int | None:
    """The core for what is measured: not the one of the load, where there are two."""
    return cores()[0] if len(cores()) > 1 else None


def begin_child(core: int | None = None) -> None:
    """Run on this core, and end with the benchmark, however the benchmark ends (Linux); for ``preexec_fn``."""
    if core is not None:
        os.sched_setaffinity(0, {core})
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def pin(core: int) -> None:
    """Run on one core, where there are two or more to share out."""
    if len(cores()) > 1:
        os.sched_setaffinity(0, {core})


def scheduled(pid: int) -> tuple[float, float]:
    """CPU seconds of all threads of a process so far, and seconds for which they could have run and had no core."""
    used = waited = 0
    # The schedstat of the process itself covers only its first thread.
    for each in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):
            of_thread = each.read_text().split()
            used += int(of_thread[0])
            waited += int(of_thread[1])
    return used / 1e9, waited / 1e9


def cpu_of(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond."""
    return scheduled(pid)[0]


class Entity:
    """``twistd -n NAME`` in a process of its own, on a core of its own."""

    def __init__(
        self, name: str, *arguments: str, core: int | None = None, variables: Mapping[str, str] = MALLOC
    ) -> None:
        """:param variables: variables of the environment to add."""
        self._directory = tempfile.TemporaryDirectory(prefix="dmsg-bench-")
        self.directory = Path(self._directory.name)
        self._log = (self.directory / "log").open("wb+")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from twisted.scripts.twistd import run; run()",
                "-n",
                "--pidfile=",
                name,
                *arguments,
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            preexec_fn=lambda: begin_child(core),
            env={**os.environ, **variables},
        )

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in its log."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            text = (self.directory / "log").read_text(errors="replace")
            if match := re.search(pattern, text):
                return match
            if self.process.poll() is not None:
                raise RuntimeError(f"it ended: {text[-500:]}")
            time.sleep(0.02)
        raise TimeoutError(pattern)

    def address(self, index: int = 0) -> tuple[str, int]:
        """Return the address on which the process listens.

        :param index: position of the address among those of all its options ``--listen``.
        """
        earlier = f"(?s:listens on .*?){{{index}}}"
        match = self.wait_for(earlier + r"listens on IPv4Address\(type='TCP', host='([^']+)', port=(\d+)\)")
        return match[1], int(match[2])

    def cpu(self) -> float:
        """CPU seconds of the process so far, to the nanosecond."""
        return cpu_of(self.process.pid)

    def memory(self) -> int:
        """Resident bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
        self._directory.cleanup()

    def __enter__(self) -> Entity:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def start_server(*arguments: str, core: int | None = None) -> tuple[Entity, tuple[str, int], PubKey]:
    """A dmsg server on loopback: the process, its address and its key."""
    entity = Entity(
        "dmsg-server",
        "--listen=tcp:0:interface=127.0.0.1:backlog=1024",
        "--key-file=server.key",
        "--create",
        "--request-rate=0",
        "--max-per-address=0",
        f"--cipher={CIPHER.value}",
        *arguments,
        core=core,
    )
    try:
        key = PubKey.from_hex(entity.wait_for(r"server ([0-9a-f]{66}) listens")[1])
        return entity, entity.address(), key
    except BaseException:
        entity.stop()
        raise


def raise_descriptor_limit() -> int:
    """Raise the limit of descriptors to the maximum for this process, and return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def aead(size: int, seconds: float = 0.4, kind: Cipher = CIPHER) -> float:
    """Return the CPU seconds to decrypt and encrypt one message of ``size`` bytes, and nothing else."""
    cipher = begin_cipher(kind, bytes(32))
    nonce = bytes(12)
    plain = bytes(size)
    sealed = cipher.encrypt(nonce, plain, None)
    rounds = max(20, int(seconds / 5 / (2e-6 + size * 1.2e-9)))
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(rounds):
            cipher.decrypt(nonce, sealed, None)
            cipher.encrypt(nonce, plain, None)
        best = min(best, (time.process_time() - start) / rounds)
    return best


def key_agreement(count: int) -> float:
    """CPU seconds of what one end of a handshake cannot do without: a new key and so many ECDH."""
    one, two = SecKey.generate(), SecKey.generate()
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        for _ in range(100):
            SecKey.generate()
            for _ in range(count):
                one.ecdh(two.public)
        best = min(best, (time.process_time() - start) / 100)
    return best


def tcp_echo(size: int = 64, count: int = 2000) -> float:
    """Median seconds of an echo between two processes over one TCP connection, and nothing else."""
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    two, _ = listener.accept()
    for end in (one, two):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    child = os.fork()
    if child == 0:
        if len(cores()) > 1:
            os.sched_setaffinity(0, {cores()[0]})
        while data := two.recv(65536):
            two.sendall(data)
        os._exit(0)
    two.close()
    block = bytes(size)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        one.sendall(block)
        received = 0
        while received < size:
            received += len(one.recv(65536))
        times.append(time.perf_counter() - start)
    one.shutdown(socket.SHUT_WR)
    os.waitpid(child, 0)
    one.close()
    listener.close()
    return sorted(times)[count // 2]


def splice(size: int, total: int = 64 * 1024 * 1024) -> float:
    """CPU seconds per ``size`` bytes of a process that copies from one TCP connection to another."""
    listener = socket.create_server(("127.0.0.1", 0))
    source = socket.create_connection(listener.getsockname())
    inner, _ = listener.accept()
    outer = socket.create_connection(listener.getsockname())
    target, _ = listener.accept()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        if len(cores()) > 1:
            os.sched_setaffinity(0, {cores()[0]})
        start = time.process_time()
        done = 0
        while done < total:
            data = inner.recv(65536)
            if not data:
                break
            outer.sendall(data)
            done += len(data)
        os.write(writer, struct.pack("d", time.process_time() - start))
        os._exit(0)
    for one in (source, target):
        one.setblocking(False)
    block = bytes(1 << 18)
    sent = received = 0
    while received < total:
        readable, writable, _ = select.select([target], [source] if sent < total else [], [], 30)
        if not readable and not writable:
            raise TimeoutError("splice")
        if readable:
            received += len(target.recv(1 << 18))
        if writable:
            sent += source.send(block[: total - sent])
    (cpu,) = struct.unpack("d", os.read(reader, 8))
    os.waitpid(child, 0)
    for closing in (listener, source, inner, outer, target):
        closing.close()
    os.close(reader)
    os.close(writer)
    return float(cpu) * size / total
