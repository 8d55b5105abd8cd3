"""Simulation: events of an invented network of any size, reproducible from a seed.

Spark computes the events from counters and hashes, so that 20 million events take minutes and little memory. The
distributions are:

* a server's share of transports falls with its rank, as 1 / rank ** 0.6;
* the number of transports that begin per hour follows a wave over the day, with its peak at noon;
* the number of a transport's client grows with the square of a uniform draw, so that few clients have many transports;
* durations and bytes are log-normal (median 20 s and 30 kB, sigma 1.5 and 2);
* round-trip times are log-normal around a median for each server, 5 to 80 ms;
* one request in 33 is refused by the other end;
* on one day of twenty, a server has an outage of two hours; half of these outages begin with a crash;
* receipts: from both ends for 80 % of transports, from one end for 10 %.

The simulation also contains planted anomalies, which the pipeline should find.
:mod:`dmsg.analytics.simulate.ground_truth` defines them, and the file ``truth.jsonl`` lists those of a simulation.
"""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import asdict
from hashlib import md5
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from dmsg.analytics.simulate.entities import discovery_lines, server_lines
from dmsg.analytics.simulate.ground_truth import PlantedAnomaly, attackers, crash, server_anomalies, server_key
from dmsg.analytics.simulate.network import Network, Scenario
from dmsg.analytics.simulate.traffic import receipt_lines, transport_lines
from dmsg.telemetry.schema import EVENTS_PREFIX, RECEIPTS_PREFIX, SCHEMA_VERSION, SEGMENT_SUFFIX

__all__ = ["Network", "Simulation"]
TRUTH = "truth.jsonl"
"""Name of the file with one line of JSON for each planted anomaly."""


class Simulation:
    """Generator of the events of a network. It writes them to files in JSON."""

    def __init__(self, spark: SparkSession, network: Network) -> None:
        self.network = network
        self.stage = Scenario(spark, network)

    def truth(self) -> list[PlantedAnomaly]:
        """Return all anomalies that the simulation plants, including random crashes."""
        network = self.network
        crashed = self.stage.plan().where("crashed").select("producer", "day").orderBy("day", "producer").collect()
        return [
            *server_anomalies(network.servers, network.last_day, network.days),
            *(crash(row.producer, row.day, network.last_day, network.days) for row in crashed),
            *attackers(network.servers, network.last_day, network.days, fleet=network.fleet),
        ]

    def lines(self) -> dict[str, DataFrame]:
        """Return the lines of events for each group of files. The keys are parts of the files' names."""
        return {
            "transports": transport_lines(self.stage),
            "servers": server_lines(self.stage).coalesce(8),
            "discovery": discovery_lines(self.stage).coalesce(4),
            "receipts": receipt_lines(self.stage),
        }

    def write(self, directory: Path) -> dict[str, int]:
        """Write a spool, its receipts as ``dmsg analytics verify`` would write them, and the list of planted anomalies.

        :param directory: directory in which to create ``spool/``, ``checked/`` and the file ``TRUTH``.
        :returns: number of files written to ``spool`` and to ``checked``.
        """
        written = {"spool": 0, "checked": 0}
        for name, lines in self.lines().items():
            of_receipts = name == "receipts"
            target = directory / ("checked" if of_receipts else "spool")
            fresh = directory / f".{name}"
            lines.write.mode("overwrite").option("compression", "gzip").text(str(fresh))
            target.mkdir(parents=True, exist_ok=True)
            for number, part in enumerate(sorted(fresh.glob("part-*.gz"))):
                stem = f"{RECEIPTS_PREFIX if of_receipts else EVENTS_PREFIX}{name}-{self.network.seed}-{number:06d}"
                with open(part, "ab") as file:  # The last line is appended as another member of the gzip file.
                    file.write(gzip.compress(self._end(stem)))
                part.replace(target / f"{stem}{SEGMENT_SUFFIX}")
                written[target.name] += 1
            shutil.rmtree(fresh)
        truth = [asdict(one) | {"day": str(one.day)} for one in self.truth()]
        (directory / TRUTH).write_text("".join(json.dumps(one) + "\n" for one in truth))
        return written

    def _end(self, stem: str) -> bytes:
        row = {
            "v": SCHEMA_VERSION,
            "type": "segment_end",
            "producer": server_key(0),
            "role": "server",
            "boot": md5(stem.encode()).hexdigest(),  # noqa: S324
            "seq": 0,
            "ts": self.network.first_ms,
            "mono": 0,
        }
        return json.dumps(row).encode() + b"\n"
