"""Programs of the siege that are no daemons: entities under attack, and the visitor that acts for the innocent."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.machine import Entity, begin_child

ANSWER_TIMEOUT = 30.0
"""Seconds that the visitor may take for what it is asked to do."""
DMSG = ("-c", "from dmsg.cli.entry import entry; entry()")
"""Words by which Python runs the command ``dmsg``."""


class Program(Entity):
    """A program of Python as an entity: its memory and CPU time can be asked for.

    :param words: what follows ``python``.
    """

    def __init__(self, *words: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="dmsg-siege-")
        self.directory = Path(self._directory.name)
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=begin_child,
        )

    def wait_for(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.search(pattern, line.decode()):
                return match
        raise RuntimeError("it ended")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self._directory.cleanup()


class Visitor:
    """Innocent clients in a process of their own (:mod:`benchmarks.siege.visitor`), asked from any thread.

    :param discovery: URL.
    """

    def __init__(self, discovery: str) -> None:
        self._program = Program("-m", "benchmarks.siege.visitor", discovery)
        self._numbers = count()
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[str]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._program.process.stdout is not None
        for line in self._program.process.stdout:
            answer = json.loads(line)
            waiting = self._answers.pop(answer["number"], None)
            if waiting is not None:
                waiting.put(answer["error"])

    def ask(self, act: str, **order: Any) -> None:
        """Send a request to the program, and wait for its answer.

        :raises ConnectionError: it failed.
        """
        answer: queue.SimpleQueue[str] = queue.SimpleQueue()
        with self._lock:
            number = next(self._numbers)
            self._answers[number] = answer
            pipe = self._program.process.stdin
            assert pipe is not None
            pipe.write(json.dumps({"number": number, "act": act, **order}).encode() + b"\n")
            pipe.flush()
        try:
            error = answer.get(timeout=ANSWER_TIMEOUT)
        except queue.Empty:
            error = "no answer"
        if error:
            raise ConnectionError(error)

    def stop(self) -> None:
        """End it."""
        self._program.stop()
