"""Start of the agent in the background, and the wait until it can be used."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dmsg.agent.socket_path import AgentError, ask, find_agent
from dmsg.cli.agent.log import open_log
from dmsg.cli.config_file import config_path
from dmsg.cli.output import fail, notice, say, tell
from dmsg.errors import DmsgError, KeyFileError
from dmsg.keys import default_key

if TYPE_CHECKING:
    from dmsg.cli.client_settings import ClientSettings

START_TIME = 20.0
"""Seconds to wait until the agent answers."""
ONLINE_TIME = 15.0
"""Seconds to wait until the agent is connected to a server and its entry is in discovery.  After that the command ends,
and the agent continues its attempts.
"""
LOG_TAIL_SIZE = 2000
"""Number of bytes at the end of the log in which an error is searched for."""


def default_key_file(settings: ClientSettings) -> ClientSettings:
    """Return settings that name a key file. If the user gave none, it is the default key file, which is created if it
    does not exist.
    """
    if settings.key_file is not None:
        return settings
    path = config_path().parent / "key"
    try:
        is_new = not path.exists()
        key = default_key(path)
    except KeyFileError as error:
        fail(error)
    if is_new:
        notice(f"your key from now on: {path} ({key.public.text})")
    return replace(settings, key_file=str(path))


def start(path: Path, settings: ClientSettings, log: Path) -> None:
    """Start the agent in a process that continues after this command, and wait until the agent is online.

    :raises SystemExit: the agent has ended; the last lines of its log were printed.
    """
    try:
        descriptor = open_log(log)
    except DmsgError as error:
        fail(error)
    began = os.fstat(descriptor).st_size
    # The process gets a session of its own, so that neither Ctrl-C nor the end of this terminal stops it.
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "dmsg.cli", "up", "--foreground", f"--log={log}", *_arguments(settings)],
        stdin=subprocess.DEVNULL,
        stdout=descriptor,
        stderr=descriptor,
        start_new_session=True,
        cwd="/",
        env=_environment(),
    )
    os.close(descriptor)
    try:
        _wait(path, child, log, began)
    except KeyboardInterrupt:
        if child.poll() is None:
            notice(f"the agent (process {child.pid}) runs in the background: dmsg status shows it, dmsg down stops it")
        raise


def _wait(path: Path, child: subprocess.Popen[bytes], log: Path, began: int) -> None:
    """Wait until the agent is online, and print the result.

    :param began: size of the log before the agent was started.
    """
    until = time.monotonic() + START_TIME
    found = None
    while found is None:
        if child.poll() is not None:
            _say_last_words(log, began)
            raise SystemExit(child.returncode or 1)
        if time.monotonic() > until:
            fail(DmsgError(f"the agent (process {child.pid}) does not answer; it says why in {log}"))
        time.sleep(0.05)
        with suppress(AgentError):  # The agent is just starting or ending.
            found = find_agent(path)
    fields = {"up": str(found.key), "pid": found.pid, "log": str(log)}
    try:
        answer = ask(path, {"do": "wait", "published": True, "timeout": ONLINE_TIME}, timeout=ONLINE_TIME + 5)
    except (DmsgError, OSError) as error:
        tell(f"up: {found.key.text} (process {found.pid}), not online yet", **fields, servers=[])
        notice(f"{error}; the agent keeps trying: see dmsg status")
        return
    servers = answer.get("servers", [])
    by = f"{len(servers)} server{'' if len(servers) == 1 else 's'}"
    tell(f"up: {found.key.text}, through {by} (process {found.pid})", **fields, servers=servers)


def _arguments(settings: ClientSettings) -> list[str]:
    """Return the options of the agent's command line.  Paths are absolute, because the agent runs in another
    directory.
    """
    assert settings.key_file is not None
    choice = settings.choice
    words = [f"--key-file={os.path.abspath(settings.key_file)}"]
    words += [f"--discovery={url}" for url in settings.discovery]
    words += [f"--prefer={key}" for key in choice.prefer] + [f"--only={key}" for key in choice.only]
    words += [f"--min-servers={choice.min_servers}", f"--encryption={settings.encryption}"]
    words += [f"--resume={settings.resume_timeout}", f"--cipher={settings.cipher}"]
    flags = {"--receipts": settings.receipts, "--create": settings.create, "--share": settings.share}
    return words + [flag for flag, given in flags.items() if given]


def _environment() -> dict[str, str]:
    """Return the environment of the agent.  Paths are absolute, because the agent runs in another directory."""
    named = {name: os.environ.get(name, "") for name in ("DMSG_CONFIG", "DMSG_AGENT", "DMSG_NAMES")}
    return {**os.environ, **{name: os.path.abspath(path) for name, path in named.items() if path}}


def _say_last_words(log: Path, began: int) -> None:
    try:
        with log.open("rb") as file:
            file.seek(max(began, log.stat().st_size - LOG_TAIL_SIZE))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    said = [line for line in lines if line.startswith("dmsg: ")] or lines[-3:]
    said = said or [f"dmsg: the agent has ended, and {log} does not say why: is the disk full?"]
    for line in said[-3:]:
        say(line, err=True)
