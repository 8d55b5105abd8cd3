"""Streams over a network of namespaces that breaks; ``make long WHICH=lab`` runs these, they take minutes."""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

from tests.testing.test_namespaces import NamespaceCase


class StreamTests(NamespaceCase):
    """A copy of a file over a network that breaks."""

    def copy(self, size: int, breaking: Any) -> None:
        self.network()
        lab = self.lab
        for relay in self.relays:
            lab.path(relay, "bob", delay=0.005, rate=20e6)
        (lab.directory / "shared").mkdir()
        content = os.urandom(size)
        (lab.directory / "film").write_bytes(content)
        bob = self.dmsg("bob", "cp", "--listen", "shared", "--writable", "--anyone", "-k", "bob.key", "--create")
        bob.line("is at")
        alice = self.dmsg("alice", "-v", "cp", "film", f"{self.key.public}:")
        part = lab.directory / "shared" / ".film.dmsg-part"
        end = time.monotonic() + 30
        while time.monotonic() < end and not (part.exists() and part.stat().st_size > size // 5):
            time.sleep(0.01)
        self.assertTrue(part.exists(), alice.output)
        breaking()
        self.assertEqual(alice.wait(120), 0, alice.output)
        copied = (lab.directory / "shared" / "film").read_bytes()
        self.assertEqual(hashlib.sha256(copied).digest(), hashlib.sha256(content).digest())
        self.assertIn("goes on", alice.output)

    def carrying(self) -> str:
        """The relay over which most goes: the one with more bytes on its way to bob."""
        return max(self.relays, key=lambda name: self._sent(name))

    def _sent(self, name: str) -> int:
        done = self.lab.run(name, "cat", "/proc/net/dev")
        done.wait()
        line = next(line for line in done.output.splitlines() if "wire" in line)
        return int(line.split(":")[1].split()[8])

    def test_streams_survive_kill_9_of_a_server(self) -> None:
        self.copy(20_000_000, lambda: self.relays[self.carrying()].kill())

    def test_a_relay_that_hangs(self) -> None:
        self.copy(20_000_000, lambda: self.relays[self.carrying()].pause())

    def test_a_cut_way_and_loss(self) -> None:
        def cut() -> None:
            carrying = self.carrying()
            self.lab.partition(carrying, "bob")
            other = next(name for name in self.relays if name != carrying)
            self.lab.path(other, "bob", loss=0.01, reorder=0.01)

        self.copy(5_000_000, cut)
