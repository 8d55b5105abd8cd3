"""Runs of a lab that a seed repeats: in another process, and whatever the process asks for chance or the time."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import secrets
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase
from twisted.web import http

import dmsg
from dmsg.keys import SecKey
from dmsg.testing.determinism import START, Determinism, Trace
from dmsg.testing.lab import repeatable_lab

SOURCES: dict[str, Callable[[], object]] = {
    "os.urandom": lambda: os.urandom(8),
    "os.getpid": lambda: os.getpid(),
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

BINDABLE = re.compile(r"\b(?:time\.(?:time|time_ns|monotonic|gmtime|localtime)|os\.urandom|secrets\.token\w+)\b(?!\()")
"""Functions of the system that a Determinism replaces, in a place that does not call them."""

REACTOR_CLOCK = (
    "net/reactor.py: partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, 'CLOCK_BOOTTIME') "
    "else time.monotonic"
)
"""The only binding: the clock of the real reactor. The hosts of a lab are reactors with the lab's clock."""

VALUES = {"PubKey", "QueueId", "bool", "bytes", "int", "str", "tuple"}
"""Types whose hash does not depend on where an object is in memory."""

VISITING = {"dict.fromkeys", "iter", "list", "next", "tuple"}
"""Functions that visit the items of a set one after another."""
SET_OF_OBJECTS = re.compile(r"(?:Weak)?[Ss]et\[(\w+).*\]")
"""Annotation of a set, with the type of its items as the first group."""

IN_ANY_ORDER = {
    "aio/client.py: _tasks": "a lab has no event loop of asyncio",
    "servers/holdings.py: _quiet_before": "only the memory of ciphers is released, and nobody notices in which order",
}
"""Sets of objects that modules visit although their order is not determined, each with the reason."""

WALKS = """
import json, sys
from functools import partial
from random import Random
from dmsg.base.interpreter import begin_process
begin_process()
chance = Random()
junk = [bytearray(chance.randrange(16, 600)) for _ in range(20_000)]  # Moves what is made later in memory.
del junk[::2]
from dmsg.testing import agent_walk, bus_walk, code_walk, discovery_walk, messaging_walk
from dmsg.testing.plan import Plan, Step, draw
from dmsg.testing.walk import Walk, walk
Walk._check_single_faults = lambda one: None  # They take half of the time of a walk.
def followed(module, *drawn):
    return module.follow(*drawn).trace
def drawn(module, steps):
    return module.follow(draw(1, steps, module.FAULTS))[1]
stop = Plan(1, (Step(((0, 100),), "stop agent", 1, 3.0), Step(((0, 100),), "kill program", 2, 3.0)))
walks = {
    "lies": lambda: walk(101, steps=10, lies=True).trace,
    "agent": partial(followed, agent_walk, stop),
    "code": partial(followed, code_walk, code_walk.draw_plan(1, 5)),
    "discovery": partial(followed, discovery_walk, discovery_walk.draw_plan(1, 30)),
    "bus": partial(drawn, bus_walk, 10),
    "messaging": partial(drawn, messaging_walk, 30),
}
traces = {name: walks[name]() for name in sorted(walks, reverse=sys.argv[1] == "2")}
print(json.dumps({name: (one.digest(), one.count) for name, one in traces.items()}))
"""
"""One walk of each kind, in one of two orders."""


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
        self.assertEqual({name for name in SOURCES if one[name] == other[name]}, by_clock | {"os.getpid"})

    def test_afterwards_the_sources_are_those_of_the_system_again(self) -> None:
        before = (os.urandom, os.getpid, time.time, time.monotonic, random.Random.seed, threading.Thread.start)
        state = random.getstate()
        with self.assertRaises(ZeroDivisionError), Determinism(1, Clock()):
            raise ZeroDivisionError
        after = (os.urandom, os.getpid, time.time, time.monotonic, random.Random.seed, threading.Thread.start)
        self.assertEqual(before, after)
        self.assertEqual(state, random.getstate())
        self.assertNotEqual(os.urandom(8), self.drawn(1)["os.urandom"])

    def test_no_thread_can_be_started(self) -> None:
        with Determinism(1, Clock()):
            self.assertRaisesRegex(RuntimeError, "threads are not", threading.Thread(target=print).start)


def bound_at_import(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that the import of a module evaluates: its own, those of its classes, and defaults of
    arguments."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from (*node.args.defaults, *(one for one in node.args.kw_defaults if one is not None))
            for inner in ast.walk(node):
                if inner is not node and isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                    yield from inner.args.defaults
        elif isinstance(node, ast.expr):
            if not isinstance(node, ast.Constant):  # A docstring may name a function.
                yield node
        else:
            yield from bound_at_import(node)


class BindingTests(SynchronousTestCase):
    """Sources that are bound before a lab replaces them."""

    def test_no_module_binds_a_clock_or_chance_at_import(self) -> None:
        """Else a lab could not replace it: the date of a host would be that of the system."""
        found = []
        root = Path(dmsg.__file__).parent
        for path in sorted(root.rglob("*.py")):
            source = path.read_text()
            if BINDABLE.search(source):
                bound = [ast.unparse(one) for one in bound_at_import(ast.parse(source))]
                found += [f"{path.relative_to(root)}: {text}" for text in bound if BINDABLE.search(text)]
        self.assertEqual(found, [REACTOR_CLOCK])

    def test_bindings_are_found(self) -> None:
        source = "class A:\n a = time.time\n def b(self, *, c=os.urandom):\n  d = time.time\n  e = time.time()"
        found = [ast.unparse(one) for one in bound_at_import(ast.parse(source))]
        self.assertEqual([text for text in found if BINDABLE.search(text)], ["time.time", "os.urandom"])


def iterated_sets(tree: ast.AST) -> Iterator[str]:
    """Yield the names of attributes that are sets of objects, and whose items the module visits one after another."""
    objects = {
        node.target.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and (found := SET_OF_OBJECTS.fullmatch(ast.unparse(node.annotation)))
        and found[1] not in VALUES
    }
    for node in ast.walk(tree):
        visited: list[ast.expr] = []
        if isinstance(node, ast.For | ast.comprehension):
            visited = [node.iter]
        elif isinstance(node, ast.Starred):
            visited = [node.value]
        elif isinstance(node, ast.BinOp):
            visited = [node.left, node.right]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in VISITING:
            visited = node.args
        yield from (one.attr for one in visited if isinstance(one, ast.Attribute) and one.attr in objects)


class SetTests(SynchronousTestCase):
    """Sets of objects, whose order depends on where the objects are in memory."""

    def test_no_module_visits_a_set_of_objects(self) -> None:
        """Else a walk would depend on when the garbage collector frees memory."""
        root = Path(dmsg.__file__).parent
        found = {
            f"{path.relative_to(root)}: {name}"
            for path in sorted(root.rglob("*.py"))
            if SET_OF_OBJECTS.search(source := path.read_text())
            for name in iterated_sets(ast.parse(source))
        }
        self.assertEqual(found, set(IN_ANY_ORDER))

    def test_sets_that_are_visited_are_found(self) -> None:
        source = (
            "def __init__(self):\n self._a: set[Link] = set()\n self._b: set[str] = set()\n"
            " self._c: set[Link] = set()\n self._d: WeakSet[Link] = WeakSet()\n"
            "def f(self, link):\n self._c.add(link)\n for one in list(self._a): pass\n for one in self._b: pass\n"
            " return {*self._d}"
        )
        self.assertEqual(sorted(iterated_sets(ast.parse(source))), ["_a", "_d"])


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

    def test_a_date_drifts_until_it_is_set(self) -> None:
        with repeatable_lab(1) as lab:
            host = lab.network.host("one")
            host.ahead = 100.0
            host.drift(-0.5)
            lab.network.run(10)
            self.assertAlmostEqual(host.ahead, 95.0)
            host.drift(0.0)
            lab.network.run(10)
            self.assertAlmostEqual(host.ahead, 95.0)
            host.drift(1.0)
            host.ahead = 0.0
            lab.network.run(10)
            self.assertEqual(host.ahead, 0.0)

    def test_the_store_of_a_discovery_begins_with_the_date_of_its_host(self) -> None:
        """Later, the store's clock follows the monotonic clock, whatever happens to the host's date."""
        with repeatable_lab(1) as lab:
            host = lab.network.host("discovery")
            host.kill()
            host.ahead = -3600.0
            discovery = lab.start_discovery()
            assert discovery._running is not None
            clock = discovery._running.api._now
            before = clock()
            self.assertEqual(before, START + lab.clock.seconds() - 3600)
            host.ahead = 86400.0
            lab.network.run(10)
            self.assertAlmostEqual(clock() - before, 10.0)


class RunTests(SynchronousTestCase):
    """Complete runs of the tool."""

    def test_another_process_does_the_same_walks(self) -> None:
        """The walks are the same, although strings have other hashes and objects other addresses in that process, and
        although other walks were done there before.
        """

        def found(hash_seed: str) -> dict[str, tuple[str, int]]:
            answer = subprocess.run(
                [sys.executable, "-c", WALKS, hash_seed],
                env=os.environ | {"PYTHONHASHSEED": hash_seed},
                capture_output=True,
                text=True,
                check=True,
            )
            walks: dict[str, tuple[str, int]] = json.loads(answer.stdout)
            return walks

        one, other = found("1"), found("2")
        self.assertEqual(one, other)
        self.assertEqual(len(set(digest for digest, _ in one.values())), len(one))
        self.assertGreater(min(count for _, count in one.values()), 500)

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
