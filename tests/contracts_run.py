"""Tests of the import contracts: a forbidden import of each kind, planted in a copy, is refused.  ``make lint`` runs
them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from twisted.trial.unittest import SynchronousTestCase

ROOT = Path(__file__).parents[1]
FIRST = "from __future__ import annotations\n"
PLANTED = (
    # Each row has a file, an import to plant, and the contract that refuses the import.
    ("dmsg/base/units.py", "from dmsg.net.retry import retry_delay", "Layers"),
    ("dmsg/v2019/dial.py", "from dmsg.messaging.core.wire import Profile", "Layers"),
    ("dmsg/streams/carrier.py", "from dmsg.v2019.core.state import ClientTransport", "Layers"),
    ("dmsg/v2019/core/wire.py", "from dmsg.v2019.core.relay import Relay", "The core of 2019"),
    ("dmsg/v2019/core/table.py", "from twisted.internet import defer", "Cores do no I/O"),
    ("dmsg/rmb/relay/rules.py", "from dmsg.rmb.relay.switch import Switch", "The bus' relay"),
    ("dmsg/net/pacing.py", "from dmsg.net.web.site import answer", "Plumbing"),
    ("dmsg/analytics/jobs.py", "from dmsg.v2019.client import Client", "Layers|The pipeline shares"),
    ("dmsg/discovery/entries/gojson.py", "from dmsg.discovery.entries.entry import Entry", "Entries of discovery"),
    ("dmsg/discovery/store/base.py", "from dmsg.discovery.store.sqlite import SQLiteStore", "Stores of discovery"),
    ("dmsg/telemetry/spool.py", "import pyspark", "needs no Spark"),
    ("dmsg/net/links/interfaces.py", "from dmsg.net.links.link import Link", "Links"),
    ("dmsg/cli/bus/twin.py", "from dmsg.cli.bus.rmb import rmb", "No circles"),
    ("dmsg/cli/agent_choice.py", "from dmsg.cli.params import client_options", "The command"),
    ("dmsg/agent/bridge.py", "from dmsg.agent.programs import Service", "The agent"),
    ("dmsg/collector/status_page.py", "from dmsg.collector.service import Collector", "The collector"),
    ("dmsg/apps/sources.py", "from dmsg.apps.http_directory import file_site", "Applications"),
    ("dmsg/apps/codes/words.py", "from dmsg.apps.codes.stream import CodeFactory", "Codes"),
    ("dmsg/apps/parcels/destination.py", "from dmsg.apps.parcels.walk import OfferedFiles", "Parcels"),
    ("dmsg/analytics/schemas.py", "from dmsg.analytics.store import Store", "The pipeline: "),
    ("dmsg/analytics/gold/histograms.py", "from dmsg.analytics.gold.traffic import traffic_hour", "Gold tables"),
    ("dmsg/telemetry/receipts.py", "from dmsg.telemetry.transports import TransportRecord", "Telemetry"),
    ("dmsg/tap/options.py", "from dmsg.tap.relay import RelayOptions", "Plugins of twistd"),
    ("dmsg/pages/model.py", "from dmsg.pages.site import StatusPages", "Pages"),
    ("dmsg/testing/tcp.py", "from dmsg.testing.network import Host", "The lab"),
    ("dmsg/net/streams/outbox.py", "from dmsg.net.streams.stream import StreamTransport", "Streams"),
    ("dmsg/net/web/channel.py", "from dmsg.net.web.site import answer", "HTTP"),
    ("dmsg/agent/connections.py", "from dmsg.v2019.client import Client", "Programs that work through an agent"),
)


class ContractTests(SynchronousTestCase):
    """Each planted import breaks the contract that forbids it."""

    def lint(self, root: Path) -> tuple[int, str]:
        program = Path(sys.executable).with_name("lint-imports")
        ran = subprocess.run([program, "--no-cache"], cwd=root, capture_output=True, text=True, check=False)
        return ran.returncode, ran.stdout

    def test_planted_violations_break_the_contracts(self) -> None:
        root = Path(self.mktemp())
        shutil.copytree(ROOT / "dmsg", root / "dmsg", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / ".importlinter", root)
        status, said = self.lint(root)
        self.assertEqual(status, 0, said)
        for place, line, contract in PLANTED:
            path = root / place
            before = path.read_text()
            path.write_text(before.replace(FIRST, f"{FIRST}{line}\n"))
            status, said = self.lint(root)
            broken = [one for one in said.splitlines() if one.endswith("BROKEN")]
            self.assertEqual(status, 1, f"{line} in {place} is nobody's error")
            self.assertRegex("\n".join(broken), contract, f"{line} in {place}")
            path.write_text(before)
