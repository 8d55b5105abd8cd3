"""Limit of open files, and how many connections it permits."""

from __future__ import annotations

import resource
import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

from dmsg.apps.splice import MAX_SPLICES, max_splices
from dmsg.net.descriptors import (
    COMMAND_DESCRIPTORS,
    DESCRIPTOR_RESERVE,
    max_connections,
    raise_descriptor_limit,
)

COMMAND = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4000))
import click
from dmsg.cli.client_run import run
async def main(reactor):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
click.command()(lambda: run(main))()
"""
"""Command that prints its limits of open files, and that was started with a small soft limit."""


class DescriptorTests(SynchronousTestCase):
    """Limit of the connections of a process."""

    def set_limits(self, soft: int, hard: int) -> None:
        self.limits = (soft, hard)
        self.patch(resource, "getrlimit", lambda kind: self.limits)
        self.patch(resource, "setrlimit", lambda kind, limits: setattr(self, "limits", limits))

    def test_no_limit_is_not_the_smallest(self) -> None:
        """RLIM_INFINITY is a negative number."""
        endless = resource.RLIM_INFINITY
        for limits, expected in (
            ((1024, 4096), 4096 - DESCRIPTOR_RESERVE),
            ((1024, endless), 2**31),
            ((endless, endless), 2**31),
            ((1024, 1024), 1024 - DESCRIPTOR_RESERVE),
        ):
            self.set_limits(*limits)
            self.assertEqual(raise_descriptor_limit(), expected, limits)
            self.assertEqual(max_connections(), expected, limits)

    def test_a_command_raises_its_limit_as_far_as_it_needs(self) -> None:
        endless = resource.RLIM_INFINITY
        for limits, raised in (
            ((1024, 1_048_576), (COMMAND_DESCRIPTORS, 1_048_576)),
            ((1024, endless), (COMMAND_DESCRIPTORS, endless)),
            ((1024, 4096), (4096, 4096)),
            ((20_000, 20_000), (20_000, 20_000)),
            ((endless, endless), (endless, endless)),
        ):
            self.set_limits(*limits)
            raise_descriptor_limit(COMMAND_DESCRIPTORS)
            self.assertEqual(self.limits, raised)

    def test_peers_cannot_use_up_the_descriptors_of_a_command(self) -> None:
        """Most systems start a command with a soft limit of 1024, and a peer may open 1024 streams."""
        done = subprocess.run(
            [sys.executable, "-c", COMMAND],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        self.assertEqual((done.stdout, done.stderr), ("4000 4000\n", ""))

    def test_fewer_pairs_are_spliced_if_the_limit_cannot_be_raised(self) -> None:
        self.set_limits(1024, 1024)
        self.assertEqual(max_splices(), (1024 - DESCRIPTOR_RESERVE) // 2)
        self.set_limits(8192, 8192)
        self.assertEqual(max_splices(), MAX_SPLICES)
