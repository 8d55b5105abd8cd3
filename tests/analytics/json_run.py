"""Tests of ``--json`` in the pipeline: the objects of the documented schema (``make long WHICH=pipeline``)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from dmsg.keys import SecKey, write_key_file
from tests.analytics.spark_attention import PROGRAM
from tests.cli.json_output import check


class JsonTests(SynchronousTestCase):
    """Pipeline over a simulated network, from its events to the answers to an operator's questions."""

    def test_each_command_prints_json_objects(self) -> None:
        here = Path(self.mktemp()).absolute()
        here.mkdir(parents=True)
        write_key_file(here / "operator.key", SecKey.generate())
        environment = {**os.environ, "DMSG_CONFIG": str(here / "config.toml")}

        def said(*arguments: str) -> list[dict[str, Any]]:
            command = ("analytics", *arguments, "--json")
            done = subprocess.run(
                [*PROGRAM, *command], cwd=here, env=environment, capture_output=True, text=True, check=False
            )
            self.assertEqual(done.returncode, 0, (command, done.stdout, done.stderr))
            count = check(command, done.stdout)
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            self.assertEqual(count, len(lines))
            return lines

        (made,) = said(
            "simulate",
            "--out",
            "sim",
            "--transports",
            "300",
            "--servers",
            "3",
            "--clients",
            "20",
            "--last-day",
            "2026-11-20",
        )
        self.assertGreater(made["files"], 0)
        (checked,) = said("verify", "--spool", made["spool"], "--out", "own")
        self.assertGreaterEqual(checked["files"], 0)
        tables = ("--out", "tables")
        (run,) = said("run", "--spool", made["spool"], "--receipts", made["checked"], *tables)
        self.assertGreater(run["events"], 300)
        self.assertEqual(run["days"], 3)
        self.assertIn("placement", said("tables", *tables)[0])
        self.assertGreater(len(said("top", "traffic_hour", *tables)), 0)
        self.assertEqual(said("report", "--html", "r.html", *tables), [{"wrote": "r.html"}])
        (ranked,) = said("rank", "-k", "operator.key", "--ranking", "ranking.json", *tables)
        # Names of servers that are not in the events are not public keys.
        self.assertEqual(ranked["wrote"], "ranking.json")
        said("attention", *tables)
        self.assertEqual(len(said("optimize", *tables)), 1)
        self.assertEqual(said("forget", "--before", "2026-11-20", *tables), [{"forgotten": 2, "left": 1}])

    def test_a_failure_is_printed_as_a_json_object(self) -> None:
        done = subprocess.run(
            [*PROGRAM, "analytics", "report", "--out", self.mktemp(), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 1)
        told = json.loads(done.stdout)
        self.assertEqual(told["status"], 1)
        self.assertIn(told["text"], done.stderr)
