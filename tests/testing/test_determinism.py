"""Runs of a lab that a seed repeats: in another process, and whatever the process asks for chance or the time."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web import http

from dmsg.keys import SecKey
from dmsg.testing.determinism import START, Determinism, Trace
from dmsg.testing.lab import repeatable_lab

SOURCES: dict[str, Callable[[], object]] = {
    "os.urandom": lambda: os.urandom(8),
    "secrets": lambda: secrets.token_hex(8),
    "choice": lambda: secrets.choice(range(1 << 60)),
    "SystemRandom": lambda: random.SystemRandom().getrandbits(60),
    "Random": lambda: random.Random().getrandbits(60),
    "random": lambda: random.getrandbits(60),
    "random after seed": lambda: (random.seed(), random.getrandbits(60)),
    "uuid4": lambda: str(uuid.uuid4()),
    "key": lambda: str(SecKey.generate().public),
    "time": lambda: time.time(),
    "time_ns": lambda: time.time_ns(),
    "monotonic": lambda: time.monotonic(),
    "gmtime": lambda: tuple(time.gmtime()),
    "date of HTTP": lambda: http.datetimeToString().decode(),
}
"""Sources of random numbers and of the time that a program can ask."""

WALK = """
import json, sys
from random import Random
chance = Random()
junk = [bytearray(chance.randrange(16, 600)) for _ in range(20_000)]  # Moves what is made later in memory.
del junk[::2]
from dmsg.testing.walk import walk
found = [walk(int(seed), steps=20, lies=number > 0) for number, seed in enumerate(sys.argv[1:])]
print(json.dumps([(one.trace.digest(), one.trace.count) for one in found]))
"""


class SourceTests(SynchronousTestCase):
    """Chance and clocks in a Determinism."""

    def drawn(self, seed: int) -> dict[str, object]:
        clock = Clock()
        with Determinism(seed, clock):
            clock.advance(1.5)
            return {name: source() for name, source in SOURCES.items()}

    def test_a_seed_repeats_what_every_source_gives(self) -> None:
        one, again, other = self.drawn(1), self.drawn(1), self.drawn(2)
        self.assertEqual(one, again)
        self.assertEqual((one["time"], one["monotonic"]), (START + 1.5, 1.5))
        by_clock = {"time", "time_ns", "monotonic", "gmtime", "date of HTTP"}
        self.assertEqual({name for name in SOURCES if one[name] == other[name]}, by_clock)

    def test_afterwards_the_sources_are_those_of_the_system_again(self) -> None:
        before = (os.urandom, time.time, time.monotonic, random.Random.seed, threading.Thread.start)
        state = random.getstate()
        with self.assertRaises(ZeroDivisionError), Determinism(1, Clock()):
            raise ZeroDivisionError
        after = (os.urandom, time.time, time.monotonic, random.Random.seed, threading.Thread.start)
        self.assertEqual(before, after)
        self.assertEqual(state, random.getstate())
        self.assertNotEqual(os.urandom(8), self.drawn(1)["os.urandom"])

    def test_no_thread_can_be_started(self) -> None:
        with Determinism(1, Clock()):
            self.assertRaisesRegex(RuntimeError, "threads are not", threading.Thread(target=print).start)


class DateTests(SynchronousTestCase):
    """Dates of hosts that are wrong."""

    def test_a_host_s_date_is_wrong_and_its_timers_are_right(self) -> None:
        found: dict[str, tuple[float, float]] = {}
        with repeatable_lab(1) as lab:
            before = lab.clock.seconds()
            for name in ("one", "two"):
                host = lab.network.host(name)
                host.callLater(5, lambda name=name: found.update({name: (time.time(), time.monotonic() - before)}))
            lab.network.host("one").ahead = -3600.0
            lab.network.run(6)
            self.assertEqual(time.time(), START + lab.clock.seconds(), "the test itself is on no host")
        self.assertEqual(found, {"one": (START + before + 5 - 3600, 5), "two": (START + before + 5, 5)})


class RunTests(SynchronousTestCase):
    """Whole runs."""

    def test_another_process_does_the_same_walks(self) -> None:
        """Although strings hash to other numbers there, and objects lie elsewhere in memory."""

        def found(hash_seed: str) -> list[tuple[str, int]]:
            answer = subprocess.run(
                [sys.executable, "-c", WALK, "100", "105"],
                env=os.environ | {"PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
            )
            walks: list[tuple[str, int]] = json.loads(answer.stdout)
            return walks

        one, other = found("1"), found("2")
        self.assertEqual(one, other)
        self.assertNotEqual(one[0], one[1])
        self.assertGreater(min(count for _, count in one), 500)

    def test_a_byte_that_differs_changes_the_trace(self) -> None:
        def trace(last: bytes) -> str:
            events = Trace()
            with repeatable_lab(3, trace=events) as lab:
                lab.add_servers(1)
                lab.add_client("alice")
                lab.settle()
                events.note(lab.clock.seconds(), "end", last)
            return events.digest()

        self.assertEqual(trace(b"x"), trace(b"x"))
        self.assertNotEqual(trace(b"x"), trace(b"y"))
