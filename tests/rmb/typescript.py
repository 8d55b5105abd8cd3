"""Test A16: the official TypeScript client of the npm registry, over a relay of this product to a peer of this
product.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any

from twisted.internet import reactor
from twisted.internet.threads import deferToThread
from twisted.internet.utils import getProcessOutputAndValue
from twisted.trial.unittest import SkipTest

from dmsg.rmb.envelope.cipher import Encryption
from dmsg.rmb.registry.service import RegistryService, RegistrySettings
from dmsg.rmb.twins.identity import Identity
from dmsg.rmb.twins.twin import Twin
from tests.ports import port_of
from tests.rmb.test_peer import PeerCase
from tests.support import asynchronous, some

PACKAGE = "@threefold/rmb_direct_client@2.9.2"
WORDS = "winner giant reward damage expose pulse recipe manual brand volcano dry avoid"
INSTALL_TIMEOUT = 150


def modules() -> str:
    """Return the directory of the installed client, which is installed once for each user of this machine."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise SkipTest("there is no node and npm: the official TypeScript client cannot be run")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmsg-tests" / PACKAGE.replace("/", "-")
    done = base / "done"
    if not done.exists():
        base.mkdir(parents=True, exist_ok=True)
        (base / "package.json").write_text('{"private": true}')
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-save", "--prefix", str(base), PACKAGE]
        try:
            subprocess.run(command, cwd=base, check=True, capture_output=True, timeout=INSTALL_TIMEOUT)
        except (subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", b"") or b"").decode(errors="replace").strip().splitlines()[:1]
            raise SkipTest(f"npm did not install {PACKAGE}: {(said or [str(error)])[0]}") from None
        done.touch()
    return str(base)


class TypeScriptTests(PeerCase):
    timeout = 300

    @asynchronous
    async def test_A16_the_typescript_client_interoperates(self) -> None:
        """The client connects, sends an encrypted call, receives a service's error, and pings."""
        where = await deferToThread(modules)
        service = RegistryService(reactor, ["tcp:0:interface=127.0.0.1"], ":memory:", RegistrySettings(rate=0))
        service.startService()
        self.addCleanup(service.stopService)
        url = f"http://127.0.0.1:{port_of((await service.ready)[0])}"
        await self.registry.close()
        self.registry = some(service._table)
        self.patch(service, "_table", None)  # The table is closed with this test case's registry.
        relay = await self.named_relay()
        identity = Identity(WORDS, "sr25519")
        statement = Twin(0, identity.account, relay.domain, Encryption(WORDS).pk, False, 1).sign(identity)
        own = (await self.registry.put(statement)).id
        self.twin("B", None)
        _, b = await self.peer("B", relay)
        seen: list[Any] = []

        def answer(request: Any) -> tuple[bytes, Any]:
            seen.append(request)
            if request["cmd"] == "failing":
                return b"", {"code": 255, "message": "in words"}
            return b64decode(request["dat"]), None

        serving = deferToThread(b.serve, ["echo", "failing"], 2, answer)
        carried: list[bytes] = []
        received = relay.switch.received
        relay.switch.received = lambda session, data: carried.append(data) or received(session, data)
        script = str(Path(__file__).with_name("ts_client.cjs"))
        arguments = [script, where, relay.url, url, WORDS, str(own), str(self.ids["B"])]
        output, errors, status = await getProcessOutputAndValue(
            shutil.which("node"), arguments, env=os.environ, reactor=reactor
        )
        self.assertEqual(0, status, errors.decode(errors="replace")[-2000:])
        line = next(line for line in output.decode().splitlines() if line.startswith("RESULT "))
        results = json.loads(line.removeprefix("RESULT "))
        await serving
        self.assertEqual({"answer": {"a": "ü"}}, results["echo"])
        self.assertIn("in words", results["failing"]["error"])
        self.assertTrue(results["version"]["answer"].startswith("dmsg-"))
        self.assertEqual("pong", results["ping"])
        self.assertEqual({f"{own}:ts-session"}, {request["src"] for request in seen})
        self.assertFalse([data for data in carried if "ü".encode() in data])
