"""schemathesis against ``/openapi.json`` of a running discovery."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec
from typing import Any

import treq
from twisted.internet import reactor
from twisted.internet.utils import getProcessOutputAndValue

from tests.net.support import EntityCase
from tests.support import asynchronous

EXAMPLES = min(500, int(os.environ.get("HYPOTHESIS_EXAMPLES", "15")))
"""Number of examples for each operation and phase; ``make long WHICH=fuzz`` asks for more."""


class OpenAPITests(EntityCase):
    """The document is true."""

    if find_spec("schemathesis") is None:
        skip = "schemathesis is not installed: pip install '.[test]'"

    @asynchronous
    async def test_the_specification_is_valid(self) -> None:
        url = await self.start_discovery()
        out, err, status = await getProcessOutputAndValue(
            sys.executable,
            [
                "-c",
                "from schemathesis.cli import schemathesis; schemathesis()",
                "run",
                f"{url}/openapi.json",
                "--checks=all",
                f"--max-examples={EXAMPLES}",
                "--phases=examples,coverage,fuzzing",
                "--seed=1",
                "--no-color",
            ],
            env={**os.environ, "COLUMNS": "150"},
            reactor=reactor,
        )
        text = out.decode() + err.decode()
        self.assertEqual(status, 0, text[-6000:])
        tested = re.search(r"(\d+) generated", text)
        self.assertIsNotNone(tested, text[-2000:])

    @asynchronous
    async def test_the_specification_describes_every_path_of_the_seed(self) -> None:
        url = await self.start_discovery()
        document: Any = json.loads(await (await treq.get(f"{url}/openapi.json", persistent=False)).text())
        self.assertEqual(document["openapi"][:3], "3.1")
        described = {
            (path, method) for path, item in document["paths"].items() for method in item if method != "parameters"
        }
        routes = {
            (rule.rule.replace("<static>", "{public_key}").replace("<number>", "{nameplate}"), method.lower())
            for rule in self.discovery_routes()
            for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
            if not rule.rule.startswith(("/messaging-discovery", "/dmsg-discovery")) and rule.rule != "/openapi.json"
        }
        self.assertEqual(described, routes)

    @staticmethod
    def discovery_routes() -> Any:
        """The rules of Klein's map."""
        from dmsg.discovery.service.api import DiscoveryAPI

        return list(DiscoveryAPI._app.url_map.iter_rules())
