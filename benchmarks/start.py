"""CPU time, modules and memory of commands from start to end, and of entities until they are ready.

The limits beside them are Python without a program, the imports of Twisted's reactor and of klein, and a program of
twistd that listens on one port (``twistd portforward``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import Entity, begin_child, cpu_of
from benchmarks.report import show
from dmsg.agent.socket_path import find_agent
from dmsg.keys import SecKey, write_key_file

ROUNDS = 9
STARTS = 4
"""Number of times an entity is started before the start that the commands use."""
SETTLE = 0.3
"""Seconds until an entity that is ready has done what follows."""
_DMSG = (sys.executable, "-c", "from dmsg.cli.entry import entry; entry()")
_REPORT = (
    "import atexit, sys; atexit.register(lambda: sys.stderr.write([line for line in open('/proc/self/status') "
    "if line.startswith('VmHWM')][0])); "
)
"""Code with which a program reports its peak of resident memory. The figure that ``wait4`` returns includes the memory
of this process, from which the program was forked."""
_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_IMPORTED = re.compile(rb"^import time: +\d+ \|", re.MULTILINE)
REPORT_IMPORTS = {"PYTHONPROFILEIMPORTTIME": "1"}
"""Variable with which Python writes a line to standard error for each module that it imports."""

Row = dict[str, Any]
Command = tuple[tuple[str, ...], Mapping[str, str]]
"""Command line and environment."""


def start_rows() -> list[Row]:
    """Return CPU seconds, imported modules and MiB of memory of each program."""
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dmsg-bench-")))
            return _rows(stack, directory)
    finally:
        os.sched_setaffinity(0, here)


def _rows(stack: ExitStack, directory: Path) -> list[Row]:
    listen = "--listen=tcp:0:interface=127.0.0.1"
    discovery, entities = _entity("listens on", "dmsg-discovery", listen, "--store=memory:")
    stack.enter_context(discovery)
    host, port = discovery.address()
    url = f"http://{host}:{port}"
    server, more = _entity(
        "registered in discovery", "dmsg-server", listen, "--key-file=server.key", "--create", f"--discovery={url}"
    )
    stack.enter_context(server)
    entities += more
    forward, more = _entity("starting on", "portforward", "--port=tcp:0:interface=127.0.0.1", "--host=127.0.0.1")
    forward.stop()
    entities += more
    environments = {}
    for name in ("peer", "own"):
        key = SecKey.generate()
        write_key_file(directory / f"{name}.key", key)
        environments[name] = {**os.environ, "DMSG_AGENT": str(directory / f"{name}.socket")}
        log = directory / f"{name}.log"
        up = ("up", "-k", str(directory / f"{name}.key"), "-d", url, "--min-servers", "1", "--log", str(log))
        if name == "peer":
            peer = str(key.public)
        subprocess.run((*_DMSG, *up), env=environments[name], check=True, stdout=subprocess.DEVNULL)
        stack.callback(subprocess.run, (*_DMSG, "down"), env=environments[name], stdout=subprocess.DEVNULL)
    entities.append({"program": "agent, ready", **_used(_pid_of_agent(directory / "own.socket"))})
    alone = {**os.environ, "DMSG_AGENT": "off"}
    ping = (*_DMSG, "ping", peer, "-c", "1", "-d", url)
    return entities + _measure(
        {
            "python, no program": ((sys.executable, "-c", "pass"), alone),
            "import of twisted's reactor": ((sys.executable, "-c", "import twisted.internet.reactor"), alone),
            "import of klein": ((sys.executable, "-c", "import klein"), alone),
            "dmsg --version": ((*_DMSG, "--version"), alone),
            "dmsg ping --count 1": (ping, alone),
            "dmsg ping --count 1, agent": (ping, environments["own"]),
            "dmsg status": ((*_DMSG, "status"), environments["own"]),
        }
    )


def _measure(commands: dict[str, Command]) -> list[Row]:
    """Run each command in each round, so that other work of the machine affects all commands alike."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    rows: list[Row] = [{"program": name, **_reported(*command)} for name, command in commands.items()]
    for _ in range(ROUNDS):
        for name, command in commands.items():
            seconds[name].append(_run(*command))
    for row in rows:
        name = row["program"]
        row |= {"cpu_s_least": min(seconds[name]), "cpu_s_median": median(seconds[name])}
    return rows


def _run(command: tuple[str, ...], environment: Mapping[str, str]) -> float:
    """Return the CPU seconds of a command."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, preexec_fn=begin_child)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command[-5:]} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def _reported(command: tuple[str, ...], environment: Mapping[str, str]) -> Row:
    """Return the number of modules that a command imports, and the peak of its resident memory in MiB."""
    python, option, code, *rest = command
    ran = subprocess.run(
        [python, option, _REPORT + code, *rest], capture_output=True, check=True, env={**environment, **REPORT_IMPORTS}
    )
    peak = _PEAK.search(ran.stderr)
    assert peak is not None
    return {"modules": len(_IMPORTED.findall(ran.stderr)), "mib": int(peak[1]) / 1024}


def _entity(ready: str, *arguments: str) -> tuple[Entity, list[Row]]:
    """Start an entity several times; return the last one, which runs, and its row.

    :param ready: text in the log of an entity that is ready.
    """
    with Entity(*arguments, variables=REPORT_IMPORTS) as counted:
        counted.wait_for(ready)
        row: Row = {
            "program": f"{arguments[0]}, ready",
            "modules": len(_IMPORTED.findall((counted.directory / "log").read_bytes())),
        }
    used = []
    for _ in range(STARTS):
        with Entity(*arguments) as one:
            one.wait_for(ready)
            time.sleep(SETTLE)
            used.append(_used(one.process.pid)["cpu_s_least"])
    entity = Entity(*arguments)
    entity.wait_for(ready)
    time.sleep(SETTLE)
    last = _used(entity.process.pid)
    used.append(last["cpu_s_least"])
    return entity, [{**row, "cpu_s_least": min(used), "cpu_s_median": median(used), "mib": last["mib"]}]


def _used(pid: int) -> Row:
    """Return what a process has used: CPU seconds, and resident MiB now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return {"cpu_s_least": cpu_of(pid), "mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20}


def _pid_of_agent(path: Path) -> int:
    found = find_agent(path)
    if found is None:
        raise RuntimeError(f"no agent at {path}")
    return found.pid


if __name__ == "__main__":
    show("start", start_rows())
