"""Deterministic runs: random numbers of this process come from a seed, and its time comes from the clock of a lab.

Normally the entities of a lab get random ids, tokens, nonces and keys, the date and the process id from the operating
system. In the context of a :class:`Determinism` they get these from the lab, so that the same seed repeats a run byte
for byte, even in another process. A :class:`Trace` can prove this, because it hashes all events between the hosts.

Random numbers that C libraries such as OpenSSL draw themselves are not replaced.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from hashlib import blake2b
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import coincurve.utils
from twisted.internet.task import Clock
from twisted.web import http

START = 1_700_000_000.0
"""Date at the start of every lab, in seconds since 1970."""
PROCESS_ID = 1000
"""Process id of this process in every lab. An agent sends its process id to programs."""
TRACE_HASH_SIZE = 16
KEPT_EVENTS = 40
"""Minimum number of the last events that a trace stores as text."""


class Trace:
    """Hash of the events of a lab, in order.

    :ivar count: number of events.
    :ivar last: the last events as text, at least ``KEPT_EVENTS`` of them, or all events with ``keep_all``.
    """

    def __init__(self, *, keep_all: bool = False) -> None:
        self._hash = blake2b(digest_size=TRACE_HASH_SIZE)
        self._keep_all = keep_all
        self.count = 0
        self.last: list[str] = []

    def note(self, seconds: float, *what: object) -> None:
        """Add an event. For bytes, their size and hash are added.

        :param seconds: time of the event by the lab's clock.
        :param what: description of the event.
        """
        words = " ".join([one if one.__class__ is str else _text(one) for one in what])
        line = f"{seconds:.9f} {words}"
        self._hash.update(f"{line}\n".encode())
        self.count += 1
        self.last.append(line)
        if not self._keep_all and len(self.last) > 2 * KEPT_EVENTS:
            del self.last[:-KEPT_EVENTS]

    def digest(self) -> str:
        """Return the hash of all events so far, as 32 hexadecimal digits."""
        return self._hash.hexdigest()


def _text(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes {blake2b(value, digest_size=8).hexdigest()}"
    return str(value)


def _refuse_thread(thread: threading.Thread) -> NoReturn:
    raise RuntimeError(f"{thread.name} was started in a lab whose runs are repeatable, and threads are not")


class Determinism:
    """Context manager in which the process gets its random numbers from a seed, and its time from a clock.

    :param clock: clock of the lab. The date is ``START`` plus the seconds of this clock.
    :ivar ahead: function that returns by how many seconds the date of the present host is ahead of the lab's date. The
        present host is the one whose code runs.
    """

    def __init__(self, seed: object, clock: Clock) -> None:
        self._random = random.Random(f"chance {seed}")
        self._clock = clock
        self.ahead: Callable[[], float] = lambda: 0.0
        self._real = ExitStack()
        """ExitStack that restores the real functions for random numbers and time at the end."""

    def date(self) -> float:
        """Return the date of the host whose code runs now, in seconds since 1970."""
        return START + self._clock.seconds() + self.ahead()

    def __enter__(self) -> Determinism:
        def urandom(size: int) -> bytes:
            return self._random.randbytes(size)

        seed_generator = random.Random.seed

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            # A generator without a seed would get one from the operating system in C code, so it is seeded here.
            seed_generator(generator, self._random.randbytes(32) if a is None else a, version)

        real_gmtime = time.gmtime

        def gmtime(seconds: float | None = None) -> time.struct_time:
            return real_gmtime(self.date() if seconds is None else seconds)

        def nanoseconds() -> int:
            return int(self.date() * 1e9)

        self._replace(os, "urandom", urandom)
        self._replace(os, "getpid", lambda: PROCESS_ID)
        self._replace(random, "_urandom", urandom)  # SystemRandom calls ``random._urandom``, and so does secrets.
        self._replace(coincurve.utils, "urandom", urandom)
        self._replace(random.Random, "seed", seed)
        # autobahn seeds the global generator anew for each connection, through ``random.seed``. This function is bound
        # to the real ``seed``, so it has to be replaced, too.
        shared = random.seed.__self__  # type: ignore[attr-defined]
        self._replace(random, "seed", lambda a=None, version=2: seed(shared, a, version))
        self._replace(time, "time", self.date)
        self._replace(time, "time_ns", nanoseconds)
        self._replace(time, "monotonic", self._clock.seconds)
        self._replace(time, "gmtime", gmtime)
        # Threads are refused, because the order in which threads run cannot be repeated.
        self._replace(threading.Thread, "start", _refuse_thread)
        self._replace(http, "time", self.date)
        self._replace(http, "gmtime", gmtime)
        self._real.callback(random.setstate, random.getstate())
        random.seed(self._random.randbytes(32))
        return self

    def _replace(self, owner: type | ModuleType, name: str, replacement: Callable[..., object]) -> None:
        self._real.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, replacement)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._real.close()
