"""``python -m dmsg.analytics.class_training FILE``: runs the pipeline's jobs once, so that Java writes the classes that
the jobs load to the archive FILE."""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from dmsg.analytics.jobs import Pipeline
from dmsg.analytics.listing import receipts_source, spool_source
from dmsg.analytics.session import Load, make_session
from dmsg.telemetry.schema import EVENTS_PREFIX, SCHEMA_VERSION, SEGMENT_SUFFIX

EXIT_SECONDS = 300.0
"""Seconds that Java may take to write the archive of classes when it ends."""


def main() -> None:
    """Run the jobs over a few events, with a JVM that archives its classes when it ends."""
    spark = make_session("local[1]", load=Load.SMALL, archive_to=Path(sys.argv[1]))
    with tempfile.TemporaryDirectory() as directory:
        spool, checked = Path(directory) / "spool", Path(directory) / "checked"
        spool.mkdir()
        checked.mkdir()
        now = datetime.now(UTC)
        envelope = {"v": SCHEMA_VERSION, "producer": "02" + 64 * "0", "role": "server", "boot": 32 * "0", "mono": 0}
        rows = [
            {**envelope, "type": kind, "seq": number, "ts": int(now.timestamp() * 1000)}
            for number, kind in enumerate(("start", "heartbeat", "transport_open", "transport_close", "stop"))
        ]
        lines = [json.dumps(row).encode() for row in rows]
        # Arrow reads the first file. The second file has a line that is no event, so that Spark's reader runs, too.
        for name, text in (("a", lines), ("b", [b"hello"])):
            (spool / f"{EVENTS_PREFIX}{name}{SEGMENT_SUFFIX}").write_bytes(gzip.compress(b"\n".join(text) + b"\n"))
        sources = [spool_source(str(spool)), receipts_source(str(checked))]
        # With tune=True, the pipeline would not use Spark for so few events.
        Pipeline(spark, f"{directory}/tables", tune=False).run(sources)
        gateway = spark.sparkContext._gateway  # noqa: SLF001  # PySpark has no other name for its Java process
        spark.stop()
        assert gateway is not None
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(EXIT_SECONDS)


if __name__ == "__main__":
    main()
