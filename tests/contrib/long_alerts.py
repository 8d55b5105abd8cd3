"""Every alert is made to fire once, by a real Prometheus that scrapes real entities: ``make long WHICH=operate``."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import treq
from twisted.internet import reactor
from twisted.internet.task import LoopingCall
from twisted.internet.threads import deferToThread

from dmsg.base.memory import Holding
from dmsg.errors import DropReason
from dmsg.keys import SecKey
from dmsg.tap import collector as collector_tap, messaging as messaging_tap, rmb_relay as relay_tap
from tests.contrib.test_prometheus import ALERTS, ROOT, RULES, program
from tests.net.support import LOOPBACK, EntityCase
from tests.ports import free_port
from tests.support import asynchronous

DASHBOARD = ROOT / "contrib" / "grafana" / "dmsg.json"
FEW = 46
"""Descriptors of a process that has hardly one left."""
TIMEOUT = 300.0
"""Seconds for all alerts."""


class FiringTests(EntityCase):
    """Real processes and sockets; waiting times of rules are seconds here, their expressions as they are."""

    timeout = 400

    @asynchronous
    async def test_each_alert_fires(self) -> None:
        prometheus = program("prometheus")
        self.again: list[Callable[[], object]] = []
        targets = [*await self.servers(), *await self.others(), f"127.0.0.1:{free_port()}"]
        restarting = free_port()
        targets.append(f"127.0.0.1:{restarting}")
        causing = LoopingCall(lambda: [cause() for cause in self.again])
        causing.start(0.25).addErrback(lambda _: None)
        self.addCleanup(causing.stop)
        port = await self.prometheus(prometheus, targets)
        waiting = set(ALERTS)
        deadline = time.monotonic() + TIMEOUT
        starts = 0
        running: subprocess.Popen[bytes] | None = None
        while waiting and time.monotonic() < deadline:
            # One server is killed and restarted repeatedly. At the end, it has hardly any free descriptors.
            if starts < 5 and (running is None or await self.scraped(port, restarting, starts)):
                starts += 1
                running = await deferToThread(self.restart, running, restarting, starts == 5)
            firing = await self.ask(port, "/api/v1/alerts")
            waiting -= {one["labels"]["alertname"] for one in firing["alerts"] if one["state"] == "firing"}
            await self.pause(0.3)
        self.assertEqual(waiting, set())
        await self.queries(port)

    async def servers(self) -> list[str]:
        """Servers with all that can go wrong."""
        nowhere = "http://127.0.0.1:1"
        bad = await self.start_server(
            f"--metrics={LOOPBACK}",
            "--max-connections=1",
            f"--telemetry={self.mktemp()}",
            f"--admission-hook={nowhere}",
            "--admission-down=admit",
        )
        await self.raw_client(bad)
        unregistered = await self.unregistered(f"--discovery={nowhere}", "--public-address=127.0.0.1:1")
        messaging = await self.start_server(f"--metrics={LOOPBACK}", tap=messaging_tap)
        bad.memory.limit = 1000
        bad.memory.add(lambda: [Holding(("x",), "test", 950, 0.0, lambda: None)])

        def cause() -> None:
            bad.factory.relay_seconds.observe(1.0)
            bad.factory.relay.drops[DropReason.FLOOD] += 100
            bad.factory.admission.hook.unanswered += 3
            bad.telemetry._recorder.lost_events += 1
            bad.telemetry.sent.waiting = 30

        self.again.append(cause)
        return [self.address(one) for one in (bad, unregistered, messaging)]

    async def unregistered(self, *options: str) -> Any:
        from dmsg.tap import server as tap

        parsed = tap.Options()
        parsed.parseOptions(
            [f"--listen={LOOPBACK}", f"--key-file={self.mktemp()}", "--create", f"--metrics={LOOPBACK}", *options]
        )
        service: Any = tap.makeService(parsed, reactor)
        service.startService()
        self.addCleanup(service.stopService)
        await service.entity.ready
        return service.entity

    async def others(self) -> list[str]:
        """A discovery without a server, a collector, a relay of the bus."""
        url = await self.start_discovery(f"--metrics={LOOPBACK}")
        metrics = self.discovery.metrics
        senders = Path(self.mktemp())
        senders.write_text(f"{SecKey.generate().public}\n")
        collector = await self.start_server_of(
            collector_tap,
            f"--store={self.mktemp()}",
            f"--senders={senders}",
            f"--discovery={url}",
            f"--key-file={self.mktemp()}",
            "--create",
        )
        collector.factory.newest["02ab"] = time.time() - 8000
        registry = Path(self.mktemp())
        registry.write_text('{"twins": []}')
        relay = await self.start_server_of(
            relay_tap, f"--registry=file:{registry}", "--queue=sqlite::memory:", f"--listen={LOOPBACK}"
        )
        relay.memory.limit = 1000
        relay.memory.add(lambda: [Holding(("x",), "messages", 950, 0.0, lambda: None)])

        def cause() -> None:
            metrics.requests.labels("/discovery/entries", "503").inc()
            metrics.seconds.labels("/discovery/entries").observe(5.0)
            metrics.refused.labels("rate_limit").inc(100)
            collector.factory.refusals["no room"] += 1
            relay.switch.dropped_oldest += 1
            relay.switch.queue.trouble = "the disk is full"
            relay.switch.federation.asking.error["relay2.example.org"] += 1
            relay.memory.held["messages"] = 950

        self.again.append(cause)
        return [self.address(one) for one in (self.discovery, collector, relay)]

    async def start_server_of(self, tap: Any, *options: str) -> Any:
        parsed = tap.Options()
        parsed.parseOptions([f"--metrics={LOOPBACK}", *options])
        service: Any = tap.makeService(parsed, reactor)
        service.startService()
        self.addCleanup(service.stopService)
        await service.entity.ready
        return service.entity

    @staticmethod
    def address(entity: Any) -> str:
        return f"127.0.0.1:{entity.metrics_port.getHost().port}"

    def restart(self, before: subprocess.Popen[bytes] | None, port: int, last: bool) -> subprocess.Popen[bytes]:
        """A server of its own process; the last one has few descriptors, and most of them in use."""
        if before is not None:
            before.send_signal(signal.SIGKILL)
            before.wait()

        def few() -> None:
            if last:
                resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, FEW))

        process = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("twistd")),
                "-n",
                "--pidfile=",
                "dmsg-server",
                "--listen=tcp:0:interface=127.0.0.1",
                "--key-file=server.key",
                "--create",
                f"--metrics=tcp:{port}:interface=127.0.0.1",
            ],
            cwd=self.home(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=few,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        if last:
            deadline = time.monotonic() + 30
            held: list[socket.socket] = []
            # The loop leaves enough descriptors for Prometheus.
            while time.monotonic() < deadline and len(os.listdir(f"/proc/{process.pid}/fd")) < FEW - 2:
                try:
                    held.append(socket.create_connection(("127.0.0.1", port)))
                except OSError:
                    pass
                time.sleep(0.1)
            for one in held:
                self.addCleanup(one.close)
        return process

    def home(self) -> str:
        directory = Path(self.mktemp()).absolute()
        directory.mkdir(parents=True)
        (directory / "twisted").symlink_to(ROOT / "twisted")
        return str(directory)

    async def prometheus(self, path: str, targets: list[str]) -> int:
        """Start Prometheus and return its port."""
        directory = Path(self.mktemp()).absolute()
        directory.mkdir(parents=True)
        rules = RULES.read_text()
        rules = re.sub(r"for: \d+m", "for: 1s", rules)
        rules = rules.replace("[30m]", "[60s]")  # The restarts take that long.
        rules = re.sub(r"\[\d+m\]", "[8s]", rules)
        (directory / "alerts.yml").write_text(rules)
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": ["alerts.yml"],
            "scrape_configs": [{"job_name": "dmsg", "static_configs": [{"targets": targets}]}],
        }
        (directory / "prometheus.yml").write_text(json.dumps(config))  # JSON is also YAML.
        port = free_port()
        process = subprocess.Popen(
            [
                path,
                f"--config.file={directory}/prometheus.yml",
                f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=(directory / "log").open("wb"),
        )
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        deadline = time.monotonic() + 60
        while True:
            try:
                response: Any = await treq.get(f"http://127.0.0.1:{port}/-/ready", persistent=False)
                await response.content()
                if response.code == 200:
                    return port
            except Exception:
                if process.poll() is not None or time.monotonic() > deadline:
                    self.fail((directory / "log").read_text())
            await self.pause(0.2)

    async def ask(self, port: int, path: str) -> dict[str, Any]:
        response: Any = await treq.get(f"http://127.0.0.1:{port}{path}", persistent=False)
        told = json.loads(await response.text())
        self.assertEqual(told["status"], "success", told)
        data: dict[str, Any] = told["data"]
        return data

    async def scraped(self, port: int, target: int, starts: int) -> bool:
        """Whether the process of this start was seen."""
        query = f'1 + changes(process_start_time_seconds{{instance="127.0.0.1:{target}"}}[60s])'
        told = await self.ask(port, f"/api/v1/query?query={quote(query)}")
        return bool(told["result"]) and float(told["result"][0]["value"][1]) >= starts

    async def queries(self, port: int) -> None:
        """Assert that each query of the dashboard is valid and returns numbers."""
        dashboard = json.loads(DASHBOARD.read_text())
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
        self.assertGreater(len(queries), 20)
        for query in queries:
            query = query.replace("$__rate_interval", "10s").replace("$instance", ".*")
            told = await self.ask(port, f"/api/v1/query?query={quote(query)}")
            self.assertTrue(told["result"], f"nothing there for: {query}")

    async def pause(self, seconds: float) -> None:
        """Let the reactor turn."""
        from twisted.internet.task import deferLater

        await deferLater(reactor, seconds)
