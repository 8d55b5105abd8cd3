"""Recorder of the pictures of commands and pages: ``python docs/pictures/record.py`` runs the commands for real.

It starts a discovery and two servers on this machine, and runs the commands of two people.  The commands and their
output become ``session.svg`` and ``top.svg``.  With Chromium, the status page of a server under load becomes
``page-light.png`` and ``page-dark.png``.  With Chromium and Java, the report of a week of a simulated network becomes
``report.png``.

``python docs/pictures/record.py report`` records only this picture.  ``--to DIRECTORY`` writes the pictures to another
directory; a test compares their texts with those of the stored pictures.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WIDTH = 96
"""Number of columns of the terminal that is drawn."""
# The format of rich loads a font from another host.  A font of the reader's system replaces it.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "Fira Code", 'ui-monospace, "DejaVu Sans Mono"'
)


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Stage:
    """Network on this machine, and the programs that two people run in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        programs = Path(sys.executable).parent
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DMSG_")},
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(directory),
            "DMSG_AGENT": "off",
            "COLUMNS": str(WIDTH),
        }
        self._running: list[subprocess.Popen[str]] = []
        self.pages: list[str] = []

    def network(self) -> None:
        """Start discovery and two servers, and wait until the servers are registered."""
        port = free_port()
        self.environment["DMSG_DISCOVERY"] = f"http://127.0.0.1:{port}"
        pages = [free_port() for _ in range(3)]
        self.pages = [f"http://127.0.0.1:{one}" for one in pages]
        self._entity(f"dmsg-discovery --listen tcp:{port}:interface=127.0.0.1 --store memory:", pages[0])
        self._until(lambda: self._answers(self.pages[0]))
        for page in pages[1:]:
            server = free_port()
            self._entity(
                f"dmsg-server --listen tcp:{server}:interface=127.0.0.1 --public-address 127.0.0.1:{server} "
                f"--discovery {self.environment['DMSG_DISCOVERY']} --key-file {server}.key --create",
                page,
            )
        for url in self.pages[1:]:
            self._until(lambda url=url: '"registered": true' in self._answers(url))  # type: ignore[misc]

    def _entity(self, words: str, page: int) -> None:
        self.start(f"twistd -n --pidfile= {words} --metrics tcp:{page}:interface=127.0.0.1")

    def _answers(self, url: str) -> str:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:  # noqa: S310  # The URL is on this machine.
                return str(answer.read().decode())
        except OSError:
            return ""

    def _until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            if time.monotonic() > deadline:
                raise SystemExit("the network does not start")
            time.sleep(0.1)

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start a command that runs in the background."""
        process = subprocess.Popen(  # noqa: S602  # All commands are written in this file.
            command,
            shell=True,
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._running.append(process)
        return process

    def run(self, command: str) -> str:
        """Run a command to its end, and return its output."""
        done = subprocess.run(  # noqa: S602
            command, shell=True, cwd=self.directory, env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    def end(self) -> None:
        """End all programs."""
        for process in reversed(self._running):
            try:
                os.killpg(process.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        for process in self._running:
            process.wait()


def terminal() -> Console:
    """Return the console that records a picture."""
    return Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True, color_system="truecolor")


def typed(console: Console, who: str, command: str) -> None:
    """Show a prompt and a command that a person types."""
    style = "bold green" if who == "alice" else "bold cyan"
    console.print(Text.assemble((f"{who}$ ", style), command))


def said(console: Console, text: str) -> None:
    """Show the output of a program."""
    for line in text.rstrip("\n").splitlines():
        console.print(Text(line), overflow="fold")


def session(stage: Stage) -> None:
    """Record a session: a file sent by a code, keys exchanged by a code, and a service at a key."""
    console = terminal()
    (stage.directory / "holiday.jpg").write_bytes(os.urandom(4_200_000))
    typed(console, "alice", "dmsg send holiday.jpg")
    sending = stage.start("dmsg send holiday.jpg --no-qr -q")
    assert sending.stdout is not None
    code = sending.stdout.readline()
    said(console, code)
    typed(console, "bob", f"dmsg receive {code.split()[1]} --dir inbox --yes")
    said(console, stage.run(f"dmsg receive {code.split()[1]} --dir inbox --yes -q"))
    typed(console, "alice", "")
    said(console, sending.stdout.read())
    console.print()
    typed(console, "alice", "dmsg pair bob --key-file alice.key --create")
    pairing = stage.start("DMSG_NAMES=alice.names dmsg pair bob --key-file alice.key --create --no-qr -q")
    assert pairing.stdout is not None
    code = pairing.stdout.readline()
    said(console, code)
    command = f"dmsg pair alice {code.split()[1]} --key-file bob.key --create"
    typed(console, "bob", command)
    said(console, stage.run(f"DMSG_NAMES=bob.names {command} -q"))
    pairing.stdout.read()
    console.print()
    typed(console, "bob", "dmsg serve inbox --allow alice --key-file bob.key &")
    serving = stage.start("DMSG_NAMES=bob.names dmsg serve inbox --allow alice --key-file bob.key -q")
    assert serving.stdout is not None
    for _ in range(2):  # The first two lines say where the service is, and who may use it.
        said(console, serving.stdout.readline())
    typed(console, "alice", "export DMSG_KEY_FILE=alice.key")
    stage.environment.update(DMSG_KEY_FILE="alice.key", DMSG_NAMES="alice.names")
    typed(console, "alice", "dmsg ping bob -c 2")
    said(console, stage.run("dmsg ping bob -c 2"))
    typed(console, "alice", "dmsg curl dmsg://bob/holiday.jpg -o copy.jpg && cmp copy.jpg holiday.jpg && echo the same")
    compare = "cmp copy.jpg holiday.jpg && echo the same"
    said(console, stage.run(f"dmsg curl dmsg://bob/holiday.jpg -o copy.jpg -q && {compare}"))
    for name in ("DMSG_KEY_FILE", "DMSG_NAMES"):
        del stage.environment[name]
    write(console, "session.svg", "Alice and Bob")


def top(stage: Stage) -> None:
    """Record ``dmsg top`` over a fleet in which one entity does not answer."""
    console = terminal()
    urls = " ".join([*stage.pages, "http://127.0.0.1:1"])
    typed(console, "alice", "dmsg top --once http://127.0.0.1:9090 http://127.0.0.1:9100 ...")
    # The command exits with status 1, because one entity does not answer.
    output = stage.run(f"dmsg top --once {urls} || true")
    wide = Console(record=True, width=140, file=open(os.devnull, "w"), force_terminal=True)
    said(wide, "\n".join(line.rstrip() for line in output.splitlines()))
    write(wide, "top.svg", "dmsg top")


def write(console: Console, name: str, title: str) -> None:
    """Write a picture that loads nothing from another host."""
    (target() / name).write_text(console.export_svg(title=title, code_format=FORMAT, unique_id=name.partition(".")[0]))


def page(stage: Stage) -> None:
    """Record the status page of a server under load."""
    sys.path.insert(0, str(ROOT))
    from tests.pages.browser import Browser, chromium

    if chromium() is None:
        sys.stderr.write("there is no Chromium here: the pictures of the page stay as they are\n")
        return
    stage.start("dmsg bench --seconds 40 --size 10000 -q")
    stage.start("dmsg bench --seconds 40 --size 1000 -q")
    time.sleep(25)
    browser = Browser()
    try:
        for dark in (False, True):
            browser.look(1100, 760, dark=dark)
            browser.go(stage.pages[1] + "/")
            time.sleep(3)
            browser.picture(str(target() / f"page-{'dark' if dark else 'light'}.png"))
    finally:
        browser.close()


def report(stage: Stage) -> None:
    """Record the top of the pipeline's report about a network with faults."""
    sys.path.insert(0, str(ROOT))
    from tests.pages.browser import Browser, chromium

    if chromium() is None:
        sys.stderr.write("there is no Chromium here: the picture of the report stays as it is\n")
        return
    size = "--transports 20000 --servers 8 --clients 400 --days 7"
    stage.run(f"dmsg analytics simulate --out sim {size} -q")
    stage.run("dmsg analytics run --spool sim/spool --receipts sim/checked --out tables -q")
    stage.run("dmsg analytics report --out tables --html report.html -q")
    browser = Browser()
    try:
        browser.look(1100, 900)
        browser.go((stage.directory / "report.html").as_uri())
        browser.picture(str(target() / "report.png"))
    finally:
        browser.close()


def arguments() -> argparse.Namespace:
    """Return the arguments: the picture to record, and its file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path, default=HERE)
    parser.add_argument("scene", nargs="*", choices=[*SCENES, []])
    return parser.parse_args()


def target() -> Path:
    """Return the directory to which the pictures are written."""
    directory: Path = arguments().to
    return directory


SCENES = {scene.__name__: scene for scene in (session, page, top, report)}


def main() -> None:
    """Record all pictures, or those named on the command line."""
    named = arguments().scene
    with tempfile.TemporaryDirectory(prefix="dmsg-record-", ignore_cleanup_errors=True) as directory:
        stage = Stage(Path(directory))
        try:
            scenes = [scene for name, scene in SCENES.items() if not named or name in named]
            if scenes != [report]:
                stage.network()
            for scene in scenes:
                scene(stage)
        finally:
            stage.end()


if __name__ == "__main__":
    main()
