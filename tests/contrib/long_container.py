"""The container's image, built by buildah on a Debian that is made here: no registry of images is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from tests.cli.network.test_host_run import free_ports

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
PACKAGES = "python3,python3-venv,ca-certificates"
BASE, IMAGE = "localhost/dmsg-test-base", "localhost/dmsg-test"
TIMEOUT = 900.0
"""Seconds for one step."""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a step of the container file."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT)


class ImageTests(SynchronousTestCase):
    """The steps of the container file in the order of a build, and the programs in the image."""

    def done(self, *command: str) -> str:
        step = run(*command)
        self.assertEqual(step.returncode, 0, (command, step.stdout[-1500:], step.stderr[-1500:]))
        return step.stdout.strip()

    def base(self) -> None:
        """A Debian with its Python, in the place of the image of Python's."""
        root = Path(self.mktemp()).absolute()
        made = run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root))
        if made.returncode:
            raise SkipTest(f"debootstrap makes no root here: {made.stdout.strip().splitlines()[-1:]}")
        (root / "usr" / "bin" / "python").symlink_to("python3")
        working = self.done("buildah", "from", "scratch")
        self.addCleanup(run, "buildah", "rm", working)
        self.done("buildah", "add", "--quiet", working, str(root), "/")
        self.done("buildah", "commit", "--quiet", working, BASE)
        self.addCleanup(run, "buildah", "rmi", "--force", BASE)
        shutil.rmtree(root, ignore_errors=True)

    def test_the_image_is_built_and_runs(self) -> None:
        for program in ("buildah", "debootstrap"):
            if shutil.which(program) is None:
                raise SkipTest(f"there is no {program} here")
        if os.geteuid():
            raise SkipTest("needs root, for a root of its own")
        self.base()
        # The files tell pip where this machine gets its packages. None of them stays in the image.
        options = [f"--env={name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
        for path in ("/etc/pip.conf", "/etc/ssl/certs"):
            if os.path.exists(path):
                options.append(f"--volume={path}:{path}:ro")
        self.done(
            *("buildah", "bud", "--isolation", "chroot", "--network", "host", f"--build-arg=BASE={BASE}"),
            *(*options, "--tag", IMAGE, "--file", "contrib/container/Containerfile", "."),
        )
        self.addCleanup(run, "buildah", "rmi", "--force", IMAGE)
        working = self.done("buildah", "from", IMAGE)
        self.addCleanup(run, "buildah", "rm", working)

        def inside(*command: str) -> str:
            return self.done("buildah", "run", "--isolation", "chroot", working, "--", *command)

        self.assertEqual(inside("id", "-un"), "dmsg")
        self.assertEqual(inside("pwd"), "/var/lib/dmsg")
        self.assertRegex(inside("dmsg", "--version"), r"^dmsg \d")
        for plugin in ("dmsg-server", "dmsg-discovery", "dmsg-collector", "rmb-relay"):
            self.assertIn("--metrics", inside("twistd", "-n", "--pidfile=", plugin, "--help"), plugin)
        self.assertEqual(len(inside("dmsg", "key", "new", "server.key")), 53)
        self.assertEqual(inside("stat", "-c", "%a %U", "server.key"), "600 dmsg")
        # A whole network, which ends as a container is stopped.
        discovery, server, status, _ = free_ports()
        ports = f"--discovery-port={discovery} --server-port={server} --status-port={status}"
        host = f"timeout 30 dmsg host --no-qr --public-address 127.0.0.1 {ports}"
        self.assertEqual(inside("sh", "-c", f"{host} | grep -m 1 -o 'dmsg join dmsg1'"), "dmsg join dmsg1")
        self.assertEqual(inside("stat", "-c", "%a", ".local/share/dmsg/host/server.key"), "600")
