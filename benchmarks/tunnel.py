"""TCP through ``dmsg expose`` and ``dmsg forward`` over a relay, beside ``ssh -L`` and plain loopback, all by iperf3.

All programs use all cores: with fewer cores than busy programs (five with dmsg, four with ssh) the rates say
how much CPU each needs, and the CPU seconds a byte say it without that.  The way is loopback.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import CIPHER, MALLOC, Entity, aead, begin_child, cpu_of
from dmsg.keys import SecKey, write_key_file

SECONDS = 4
ROUNDS = 3
CONNECTIONS = 60
_DMSG = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()")


def tunnel_rows() -> list[dict[str, Any]]:
    """Bytes a second, CPU of each end a byte, and the time until the first byte of a connection is there."""
    missing = [name for name in ("iperf3", "ssh", "sshd", "ssh-keygen") if _program(name) is None]
    if "iperf3" in missing:
        return [{"not measured": "iperf3 is not installed"}]
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dmsg-bench-")))
            target = _port()
            stack.enter_context(_running("iperf3", "-s", "-p", str(target), "-B", "127.0.0.1"))
            echo = stack.enter_context(_first_byte())
            ways: dict[str, tuple[int, int, Callable[[], dict[str, float]]]] = {}
            _wait(target)
            ways["loopback"] = target, echo, dict
            ways["dmsg"] = _dmsg(stack, directory, target, echo)
            if not missing:
                ways["ssh -L"] = _ssh(stack, directory, target, echo)
            rows = _measure(ways)
    finally:
        os.sched_setaffinity(0, here)
    if missing:
        rows.append({"way": "ssh -L", "not measured": f"not installed: {', '.join(missing)}"})
    return rows


def _measure(ways: dict[str, tuple[int, int, Callable[[], dict[str, float]]]]) -> list[dict[str, Any]]:
    """Measure each way in each round, so that other work of the machine affects all ways alike."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, (port, _, cpu) in ways.items():
            before = cpu()
            size = _iperf(port)
            after = cpu()
            rates[name].append(size / SECONDS)
            costs[name].append({part: (after[part] - before[part]) / size * 1e9 for part in after})
    # A stream that sends much data fills records of 64 KiB.
    sealed = aead(60_000) / 2 / 60_000 * 1e9
    rows = []
    for name, (_, echo, _) in ways.items():
        row: dict[str, Any] = {
            "way": name,
            "gbit_s_median": median(rates[name]) * 8e-9,
            "gbit_s_best": max(rates[name]) * 8e-9,
        }
        for part in costs[name][0]:
            row[f"{part}_ns_a_byte"] = median(one[part] for one in costs[name])
        row["first_byte_ms"] = _first(echo)
        if name == "dmsg":
            row["two_aeads_ns_a_byte"] = 2 * sealed
        rows.append(row)
    by_name = {row["way"]: row for row in rows}
    if "ssh -L" in by_name:
        by_name["dmsg"]["of_ssh"] = by_name["dmsg"]["gbit_s_median"] / by_name["ssh -L"]["gbit_s_median"]
    by_name["dmsg"]["over_direct_ms"] = by_name["dmsg"]["first_byte_ms"] - by_name["loopback"]["first_byte_ms"]
    return rows


def _iperf(port: int) -> float:
    """Bytes that have arrived at the other end of one connection."""
    run = subprocess.run(
        ["iperf3", "-c", "127.0.0.1", "-p", str(port), "-t", str(SECONDS), "-J"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + 60,
    )
    result = json.loads(run.stdout)
    if run.returncode or "sum_received" not in result["end"]:
        raise RuntimeError(f"iperf3 at port {port}: {result.get('error') or result['end']}")
    return float(result["end"]["sum_received"]["bytes"])


def _first(port: int) -> float:
    """Median milliseconds of a connection until its first byte is there, one after the other."""
    times = []
    for _ in range(CONNECTIONS):
        start = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as one:
            one.recv(1)
            times.append(time.perf_counter() - start)
    return median(times) * 1e3


def _dmsg(stack: ExitStack, directory: Path, target: int, echo: int) -> tuple[int, int, Callable[[], dict[str, float]]]:
    discovery = stack.enter_context(Entity("dmsg-discovery", "--listen=tcp:0:interface=127.0.0.1", "--store=memory:"))
    host, port = discovery.address()
    url = f"http://{host}:{port}"
    relay = stack.enter_context(
        Entity(
            "dmsg-server",
            "--listen=tcp:0:interface=127.0.0.1",
            "--key-file=server.key",
            "--create",
            f"--discovery={url}",
            f"--cipher={CIPHER.value}",
        )
    )
    relay.wait_for("registered in discovery")
    key = SecKey.generate()
    write_key_file(directory / "home.key", key)
    common = ("-d", url, "--min-servers", "1", "--cipher", CIPHER.value)
    processes = {}
    ports = []
    for name, there in (("iperf", target), ("echo", echo)):
        path = directory / f"{name}.key"
        own = SecKey.generate()
        write_key_file(path, own)
        expose = stack.enter_context(_running(*_DMSG, "expose", str(there), "-k", str(path), "-p", "1", *common))
        here = _port()
        forward = stack.enter_context(_running(*_DMSG, "forward", str(here), f"{own.public}:1", *common))
        ports.append(here)
        if name == "iperf":
            processes = {"receiver": expose.pid, "sender": forward.pid, "relay": relay.process.pid}
    for here in ports:
        _wait(here)
    _first_works(ports[1])
    return ports[0], ports[1], lambda: {part: cpu_of(pid) for part, pid in processes.items()}


def _ssh(stack: ExitStack, directory: Path, target: int, echo: int) -> tuple[int, int, Callable[[], dict[str, float]]]:
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / f"{name}.ssh")], check=True
        )
    (directory / "authorized").write_text((directory / "user.ssh.pub").read_text())
    port = _port()
    (directory / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {directory}/host.ssh\nPidFile none\nStrictModes no\n"
        f"AuthorizedKeysFile {directory}/authorized\nPasswordAuthentication no\nUsePAM no\nPermitRootLogin yes\n"
    )
    if os.getuid() == 0:
        os.makedirs("/run/sshd", exist_ok=True)  # sshd drops its privileges in this directory.
    daemon = stack.enter_context(_running(str(_program("sshd")), "-D", "-f", str(directory / "sshd_config")))
    _wait(port)
    here, there = _port(), _port()
    client = stack.enter_context(
        _running(
            "ssh",
            *("-N", "-p", str(port), "-i", str(directory / "user.ssh"), "-F", "none"),
            *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"),
            *("-L", f"127.0.0.1:{here}:127.0.0.1:{target}", "-L", f"127.0.0.1:{there}:127.0.0.1:{echo}"),
            f"{getpass.getuser()}@127.0.0.1",
        )
    )
    for one in (here, there):
        _wait(one)
    _first_works(there)
    return here, there, lambda: {"receiver": _cpu_below(daemon.pid), "sender": cpu_of(client.pid)}


# --- processes ---


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


@contextmanager
def _running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=begin_child,
        env={**os.environ, **MALLOC},
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def _first_byte() -> Iterator[int]:
    """A program that says one byte to everybody."""
    code = (
        "import socket\ns = socket.create_server(('127.0.0.1', 0))\nprint(s.getsockname()[1], flush=True)\n"
        "while True:\n    c, _ = s.accept()\n    c.sendall(b'x')\n    c.close()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, preexec_fn=begin_child)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def _port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait(port: int, seconds: float = 20) -> None:
    """Wait until a program listens on the port.

    :raises TimeoutError: none does within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody listens on port {port}") from None
            time.sleep(0.05)


def _first_works(port: int, seconds: float = 20) -> None:
    """Wait until a connection reaches the other end, whose entry has to be in discovery first."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.create_connection(("127.0.0.1", port), 5) as one:
            try:
                if one.recv(1):
                    return
            except OSError:
                pass
        time.sleep(0.2)
    raise TimeoutError(f"nothing comes from port {port}")


def _cpu_below(pid: int) -> float:
    """Return the processor seconds of a process and its children, because sshd has a child for each connection."""
    total = cpu_of(pid)
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        total += _cpu_below(int(child))
    return total


if __name__ == "__main__":
    for found in tunnel_rows():
        sys.stdout.write(f"{found}\n")
