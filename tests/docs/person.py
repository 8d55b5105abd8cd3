"""Simulated reader who types the commands of a page in terminals, one after the other, and checks their output."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.docs.blocks import ROOT, Block, Command, Page
from tests.docs.needs import CLONE
from tests.ports import free_port
from tests.redis import redis_server

TIMEOUT = 60.0
"""Seconds that a single step may take on a busy machine."""
LONG = 900.0
"""Seconds that a command may take that installs or computes something."""
KEPT = 200_000
"""Maximum number of bytes of a program's output that are kept."""
PORTS = "5201 6379 6380 8080 8081 8082 9090 9091 9100 9101 9180 9443 1080 2222".split()
"""Ports in the pages. When a page is run, each is replaced by a free port."""
FILES = {"photo.jpg": 40_000, "film.mkv": 900_000, "public/notes.txt": 300, "public/film.mkv": 700_000}
"""Files that the reader has, by name, with their sizes in bytes."""
KEY = r"a[i-p][a-z2-7]{51}|0[23][0-9a-f]{64}"
"""Pattern of a public key, in either form."""
# Commands that run until they are ended, with the text that they print when they are ready.
SERVING = {
    r"twistd .*dmsg-server|twistd .*dmsg-messaging-server": r"registered in discovery",
    r"twistd .*rmb-peer": r"connected|relay",
    r"twistd": r"listens on|listening on",
    r"dmsg receive(?! \d)": r"receiving at (\S+)",
    r"dmsg host": r"dmsg join dmsg1\w+",
    r"dmsg pair \w+ (?!\d)": r"code: (\S+)",
    rf"dmsg send (?!.*\b(?:{KEY}))": r"code: (\S+)",
    r"dmsg (listen|nc -l|messaging listen)": r"listening: (\S+)",
    r"dmsg (cp .*--listen|serve|expose|forward)": r"(is at|leads to)",
    r"dmsg (iperf|bench) --serve": r"(measured|serving) at (\S+)",
    r"dmsg rmb serve": r"answers",
    r"dmsg socks": r"SOCKS5 at",
    r"redis-server": r"Ready to accept",
    r"twist web": r"Starting factory|starting on",
    r"python \w+\.py &": r"\S",
}
_PUBLIC = re.compile(r"\b(?:0[23][0-9a-f]{2}|a[i-p][a-z2-7]{2})\.\.\.")
_INVITATION = re.compile(r"\bdmsg1\w*\.\.\.")
_CODE = re.compile(r"\b\d+-[a-z]+-[a-z]+-[a-z]+\b")


class Unexpected(Exception):
    """A command did something else than the page says."""


def pattern(line: str) -> str:
    """Return the pattern for an expected line: numbers and texts cut with three dots may differ."""
    parts = []
    for word in line.split():
        if _PUBLIC.search(word):
            parts.append(re.sub(r"0\[23\]XX", f"({KEY}|0[23][0-9a-f]{{6,}})", _escape(_PUBLIC.sub("0[23]XX", word))))
        elif _INVITATION.fullmatch(word):
            parts.append(r"(dmsg1\w+)")
        elif _CODE.fullmatch(word):
            parts.append(rf"({_CODE.pattern})")
        else:
            parts.append(_escape(word))
    return r"\s+".join(parts)


def _escape(word: str) -> str:
    escaped = re.escape(word).replace(re.escape("0[23]XX"), "0[23]XX").replace(re.escape("..."), r"\S*")
    return re.sub(r"\d(?:[\d,:]|\\\.)*", r"[\\d.,:]+", escaped) if "XX" not in escaped else escaped


class Running:
    """Running program and its output so far."""

    def __init__(self, text: str, process: subprocess.Popen[bytes]) -> None:
        self.text, self.process = text, process
        self.terminal = -1
        """Descriptor of the other end of the terminal that is the program's input; -1 without a terminal."""
        self.output = b""
        self._changed = threading.Condition()
        self._over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            while data := os.read(stream.fileno(), 65536):
                with self._changed:
                    self.output = (self.output + data)[-KEPT:]
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def until(self, wanted: str, timeout: float = TIMEOUT) -> re.Match[str]:
        """Wait until the output matches a pattern.

        :raises Unexpected: the output never matches.
        """
        regex = re.compile(wanted)

        def found() -> object:
            return regex.search(self.said) or self._over

        with self._changed:
            self._changed.wait_for(found, timeout)
        match = regex.search(self.said)
        if match is None:
            raise Unexpected(f"{self.text}\ndid not say {wanted!r}, but:\n{self.said}")
        return match

    @property
    def said(self) -> str:
        return self.output.decode(errors="replace")

    def finish(self, timeout: float) -> int:
        """Wait until the program has ended and its output is read; return its status."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise Unexpected(f"{self.text}\nis not done after {timeout:g} s:\n{self.said}") from None
        with self._changed:
            self._changed.wait_for(lambda: self._over, 5)
        return status

    def end(self, how: int = signal.SIGINT) -> None:
        """End the program with Ctrl-C, and with stronger signals if needed."""
        for number in (how, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(TIMEOUT)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
            break
        if self.terminal >= 0:
            os.close(self.terminal)
            self.terminal = -1


@contextlib.contextmanager
def _clone(*, alone: bool = False) -> Iterator[None]:
    """Context in which a clone is used, alone if the caller installs something into it.

    Pages are followed at the same time. Two concurrent runs of pip overwrite each other's files, and a program that
    starts meanwhile finds half of them.
    """
    if CLONE is None:
        yield
        return
    with open(Path(CLONE) / ".git" / "docs.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


class Person:
    """Reader who follows one page in a directory of its own."""

    def __init__(self, page: Page, directory: Path) -> None:
        self.page = page
        self.directory = directory
        self.ports = {port: str(free_port()) for port in PORTS}
        self.keys: dict[str, str] = {}
        self.own: dict[str, dict[str, str]] = {}
        """Environment variables that each terminal has set for itself, by terminal."""
        self.terminals: dict[str, Running] = {}
        self.running: list[Running] = []
        directory.mkdir(parents=True)
        home = directory / "home"
        home.mkdir()
        kept = ("PATH", "LANG", "JAVA_HOME", "TMPDIR", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "PIP_CONSTRAINT")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}
        paths = [str(Path(CLONE) / ".venv" / "bin" if CLONE else Path(sys.executable).parent)]
        if server := redis_server():
            paths.append(str(Path(server).parent))
        self.environment["PATH"] = os.pathsep.join([*paths, self.environment["PATH"]])
        self.environment.update(HOME=str(home), PYTHONUNBUFFERED="1", COLUMNS="200")
        # The path of a socket must be short.
        self.environment["XDG_RUNTIME_DIR"] = self.runtime = tempfile.mkdtemp(prefix="dmsg-")
        if page.name == "README.md":
            # The reader may have a wheel and nothing else.
            shutil.copy(ROOT / "README.md", directory)
        for name, size in FILES.items() if page.name != "README.md" else ():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(random.Random(name).randbytes(size))

    # Maps text of the page to the text that is typed.

    def adapt(self, text: str) -> str:
        """Replace ports, keys and directories of a page by those of this run."""
        text = re.sub(r"(?<![\d.])(" + "|".join(PORTS) + r")(?!\d)", lambda match: self.ports[match[1]], text)
        text = re.sub(r"(?<![\w./])/(var/lib|etc|srv)/", rf"{self.directory}/\1/", text)
        # The network gets ports and an address of this machine alone; the page has the defaults.
        ports = f"--discovery-port {self.ports['9090']} --server-port {self.ports['8080']}"
        host = f"dmsg host {ports} --status-port {self.ports['9180']} --public-address 127.0.0.1"
        text = re.sub(r"\bdmsg host\b", host, text)
        for shown, key in self.keys.items():
            text = text.replace(shown, key)
        return text

    def write(self, block: Block) -> None:
        """Write a block that is a file."""
        assert block.file_name is not None
        (self.directory / block.file_name).write_text(self.adapt(block.text))

    def start(self, text: str, cwd: Path | None = None, terminal: str = "", *, typed_at: bool = False) -> Running:
        """Start a command in a process group of its own.

        :param typed_at: whether its input is a terminal at which nobody types. A program such as ``nc`` treats that
            otherwise than a pipe whose writer has not ended.
        """
        for directory in re.findall(rf"({re.escape(str(self.directory))}/(?:var/lib|etc|srv)/[\w/.-]*)", text):
            Path(directory).parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = pty.openpty() if typed_at else (-1, subprocess.PIPE)
        process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=cwd or self.directory,
            env=self.environment | self.own.get(terminal, {}),
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running = Running(text, process)
        if typed_at:
            os.close(theirs)
            running.terminal = ours
        self.running.append(running)
        return running

    def type(self, command: Command, needs: tuple[str, ...] = ()) -> None:
        """Run one command of the page until it ends, or until it is ready to serve.

        :raises Unexpected: its status or its output differs from the page.
        """
        text = self.adapt(command.text)
        if command.terminal in self.terminals and command.terminal:
            self.terminals.pop(command.terminal).end()
        if re.match(r"(export|\.|cd) ", text):
            self._set(text, command.terminal)
            return
        for regex, ready in SERVING.items():
            if re.search(regex, text):
                self._serve(command, text, ready)
                return
        # Commands that install something are typed where README was read.
        in_clone = re.match(r"(pip|python3 -m venv|\.venv/bin/pip) ", text) if CLONE else None
        with _clone(alone=in_clone is not None):
            running = self.start(text, Path(CLONE) if in_clone and CLONE else None, command.terminal)
            assert running.process.stdin is not None
            running.process.stdin.close()
            status = running.finish(LONG if {"clone", "java"} & set(needs) else TIMEOUT)
        self._look(command, running)
        if status:
            raise Unexpected(f"{text}\nended with status {status}:\n{running.said}")

    def _set(self, text: str, terminal: str) -> None:
        """Run a command that changes the shell itself: that of its terminal or, without a terminal's name, of all
        terminals.
        """
        if text.startswith(". .venv/bin/activate"):
            return  # The directory is already in PATH.
        said = subprocess.run(
            ["bash", "-c", f"{text}\nenv -0"],
            cwd=self.directory,
            env=self.environment | self.own.get(terminal, {}),
            check=True,
            capture_output=True,
        ).stdout
        pairs = (entry.split("=", 1) for entry in said.decode().split("\0") if "=" in entry)
        new = {name: value for name, value in pairs if name not in ("_", "SHLVL", "PWD", "OLDPWD")}
        if terminal:
            self.own[terminal] = {name: value for name, value in new.items() if self.environment.get(name) != value}
        else:
            self.environment = new

    def _serve(self, command: Command, text: str, ready: str) -> None:
        with _clone():
            typed = text.partition(" #")[0].rstrip().removesuffix("&")
            running = self.start(typed, terminal=command.terminal, typed_at=True)
            if command.output:
                for line in command.output:
                    self._learn(line, running.until(pattern(line)))
            else:
                running.until(ready)
        # A command in the background continues while the next one is typed in the same terminal.
        if command.terminal and not text.partition(" #")[0].rstrip().endswith("&"):
            self.terminals[command.terminal] = running

    def _look(self, command: Command, running: Running) -> None:
        """Check that the output contains the lines of the page in their order."""
        rest = running.said
        for line in command.output:
            match = re.search(pattern(self.adapt(line) if _PUBLIC.search(line) is None else line), rest)
            if match is None:
                raise Unexpected(f"{command.text}\nshould say {line!r}; it said:\n{running.said}")
            self._learn(line, match)
            rest = rest[match.end() :]

    def _learn(self, line: str, match: re.Match[str]) -> None:
        shown_ones = _PUBLIC.findall(line) or _CODE.findall(line) or _INVITATION.findall(line)
        for shown, key in zip(shown_ones, match.groups(), strict=False):
            if re.fullmatch(KEY, key) or _CODE.fullmatch(key) or key.startswith("dmsg1"):
                self.keys.setdefault(shown, key)

    def run_python(self, block: Block) -> None:
        """Run a block that is no file to its end."""
        (self.directory / "block.py").write_text(self.adapt(block.text))
        self.type(Command("", "python block.py"))

    def wait_for(self, text: str) -> None:
        """Run a command of the page's fixtures repeatedly until it succeeds."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            running = self.start(text)
            if running.finish(TIMEOUT) == 0:
                return
            if time.monotonic() > deadline:
                raise Unexpected(f"{text}\ndid not succeed:\n{running.said}")

    def leave(self) -> None:
        """End all running programs, the last first."""
        if (Path(self.runtime) / "dmsg" / "agent.sock").exists():
            subprocess.run(["dmsg", "down"], env=self.environment, capture_output=True, check=False)
        for running in reversed(self.running):
            running.end()
            try:
                os.killpg(running.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.runtime, ignore_errors=True)


__all__ = ["ROOT", "Person", "Unexpected"]
