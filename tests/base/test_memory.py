"""Account of memory: which holding is dropped first."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from hypothesis import given, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.memory import ASSUMED_MEMORY, MEMORY_DIVISOR, MIN_LIMIT, OLD_AFTER, Holding, Memory, default_limit


class MemoryTests(SynchronousTestCase):
    """Sources that say what they hold."""

    def setUp(self) -> None:
        self.memory = Memory(1000)
        self.holdings: list[Holding] = []
        self.gave: list[Any] = []
        self.memory.add(lambda: list(self.holdings))

    def hold(self, owner: tuple[str, ...], size: int, age: float = 0.0, kind: str = "queue", around: Any = ()) -> None:
        name = (*owner, size)

        def give() -> None:
            self.gave.append(name)
            self.holdings = [one for one in self.holdings if one.drop is not give]

        self.holdings.append(Holding(owner, kind, size, age, give, around))

    def test_as_long_as_there_is_room(self) -> None:
        self.hold(("a",), 1000, 99)
        self.assertEqual((self.memory.check(), self.gave, self.memory.total), (0, [], 1000))

    def test_old_data_is_dropped_before_larger_holdings(self) -> None:
        self.hold(("innocent",), 900)
        for number in range(20):
            self.hold((f"stranger {number}",), 10 + number, OLD_AFTER)
        self.memory.check()
        self.assertTrue(all(one[0].startswith("stranger") for one in self.gave))
        self.assertEqual(self.memory.total, 900)

    def test_the_largest_holding_of_the_largest_owner_is_dropped(self) -> None:
        self.hold(("a",), 300, OLD_AFTER)
        self.hold(("b",), 250, OLD_AFTER)
        self.hold(("b",), 200, OLD_AFTER)
        self.hold(("c",), 400)
        self.memory.check()
        self.assertEqual(self.gave, [("b", 250), ("a", 300)][: len(self.gave)])
        self.assertEqual(self.gave[0], ("b", 250))

    def test_many_keys_at_one_address_count_as_one_owner(self) -> None:
        """A single larger holding at another address is dropped after them."""
        for number in range(30):
            self.hold(("203.0.113.7", f"key {number}"), 30, OLD_AFTER)
        self.hold(("198.51.100.1", "key"), 500, OLD_AFTER)
        self.memory.check()
        self.assertTrue(all(one[0] == "203.0.113.7" for one in self.gave[:13]), self.gave)

    def test_addresses_of_one_block_count_together(self) -> None:
        """Thirty addresses of one /24 that hold little each give before one elsewhere that holds more than any."""
        around = (("203.0.113.0/24", 8),)
        for number in range(30):
            self.hold((f"203.0.113.{number}", "key"), 100, OLD_AFTER, around=around)
        self.hold(("198.51.100.1", "key"), 300, OLD_AFTER)
        self.memory.check()
        self.assertEqual([one[0].startswith("203.0.113.") for one in self.gave[:7]], [True] * 6 + [False])

    @given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 400), st.floats(0, 9)), max_size=40))
    def test_eviction_always_reaches_the_limit(self, held: list[tuple[int, int, int, float]]) -> None:
        self.setUp()
        for place, key, size, age in held:
            self.hold((str(place), str(key)), size, age)
        before = sum(one.size for one in self.holdings)
        self.memory.check()
        after = sum(one.size for one in self.holdings)
        if before <= 1000:
            self.assertEqual(after, before)
        else:
            self.assertLessEqual(after, 1000)
        self.assertEqual(self.memory.total, after)
        self.assertEqual(sum(self.memory.dropped.values()), len(self.gave))

    def test_the_default_limit_follows_the_machine(self) -> None:
        self.assertGreaterEqual(default_limit(), MIN_LIMIT)
        self.patch(Path, "read_text", lambda path: "max")
        self.patch(os, "sysconf", lambda name: -1)
        self.patch(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        self.assertEqual(
            default_limit(), ASSUMED_MEMORY // MEMORY_DIVISOR, "a system that does not say it has not none"
        )

    def test_the_default_limit_follows_the_limits_of_the_process(self) -> None:
        """The limits of a container, of a service of systemd, of a user's slice, and of ulimit."""
        gib = 1 << 30
        service = "/system.slice/dmsg.service"
        top, old = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
        for groups, files in (
            ("0::/\n", {f"{top}/memory.max": gib}),
            ("", {f"{top}/memory.max": gib}),
            (f"0::{service}\n", {f"{top}{service}/memory.max": gib}),
            (f"0::{service}\n", {f"{top}{service}/memory.max": 3 * gib, f"{top}/system.slice/memory.max": gib}),
            (f"5:cpu:/\n4:memory:{service}\n0::/\n", {f"{old}{service}/memory.limit_in_bytes": gib}),
            ("4:memory:/docker/1\n0::/\n", {f"{old}/memory.limit_in_bytes": gib}),
        ):
            self.limit(groups, files)
            self.assertEqual(default_limit(), gib // MEMORY_DIVISOR, (groups, files))
        self.limit("5:cpu:/a\n", {f"{top}/a/memory.max": gib, f"{old}/a/memory.limit_in_bytes": gib})
        self.assertEqual(default_limit(), 2 * gib)
        small = 128 << 20
        self.limit("0::/\n", {f"{top}/memory.max": small})
        self.assertEqual(default_limit(), small // MEMORY_DIVISOR, "a small container has room for the program, too")
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
            self.limit("", {}, {kind: gib})
            self.assertEqual(default_limit(), gib // MEMORY_DIVISOR)

    def limit(self, groups: str, files: dict[str, int], limits: dict[int, int] | None = None) -> None:
        """Pretend that this machine has 8 GiB of memory, and that this process has these limits.

        :param groups: content of ``/proc/self/cgroup``; empty if the file does not exist.
        :param files: limits of control groups by the name of their file.
        :param limits: limits of ulimit by their kind.
        """

        def read_text(path: Path) -> str:
            if str(path) == "/proc/self/cgroup" and groups:
                return groups
            if str(path) in files:
                return f"{files[str(path)]}\n"
            raise FileNotFoundError(path)

        self.patch(Path, "read_text", read_text)
        self.patch(os, "sysconf", lambda name: 4096 if name == "SC_PAGE_SIZE" else 1 << 21)
        self.patch(resource, "getrlimit", lambda kind: ((limits or {}).get(kind, resource.RLIM_INFINITY), 0))
