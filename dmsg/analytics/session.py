"""Spark sessions (local, in a cluster, or by Spark Connect) and the search for a Java to run them on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from py4j.java_gateway import java_import
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

JAVA_VERSIONS = (17, 21)
"""Major versions of Java that are accepted: the jobs are tested on 17, and Spark supports 21."""
DRIVER_MEMORY = "1g"
APPLICATION = "dmsg-analytics"

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # An absurd number in an event must not end a run: with ANSI mode off, what cannot be computed is NULL.
    "spark.sql.ansi.enabled": "false",
    # The JVM never compiles methods above 8,000 bytes of bytecode. Spark generates longer ones by default, which would
    # stay interpreted.
    "spark.sql.codegen.hugeMethodLimit": "8000",
    # The tables of a day are small, and each partition costs a task.
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.io.compression.zstd.level": "1",
    # A task keeps one open file per partition instead of sorting its rows by partition first.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.streaming.metricsEnabled": "false",
    # Otherwise Python tells Java the source line of every new column, which is half of all calls to Java.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "100",
}
"""Settings of every session; ``--conf`` of spark-submit overrides each."""
LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.warehouse.dir": "/nonexistent",
    # The parallel collector has the best throughput; nobody waits for single answers, so its pauses do no harm.
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
}


QUICK_SETTINGS = {
    # The second JIT compiler takes seconds that only minutes of work would repay.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.heartbeatInterval": "60s",
}


class JavaMissing(Exception):
    """No Java that Spark runs on was found; the text says how to get one."""


class SparkFailed(Exception):
    """No Spark session could be made; the text says why in one line."""


def _java_version(java: str) -> int | None:
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None
    found = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found else None


def find_java() -> Path:
    """Return the home of a suitable Java, looking in ``JAVA_HOME``, ``PATH`` and Debian's directories.

    :raises JavaMissing: no suitable Java was found.
    """
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    if (found := shutil.which("java")) is not None:
        homes.append(Path(found).resolve().parent.parent)
    homes += sorted(Path("/usr/lib/jvm").glob("java-17-*")) + sorted(Path("/usr/lib/jvm").glob("java-21-*"))
    seen = []
    for home in homes:
        version = _java_version(str(home / "bin" / "java"))
        if version in JAVA_VERSIONS:
            return home
        if version is not None:
            seen.append(f"{version} in {home}")
    there = f"found {', '.join(seen)}; " if seen else ""
    raise JavaMissing(
        f"Spark needs Java 17: {there}on Debian and Ubuntu `apt-get install openjdk-17-jre-headless`, "
        "else set JAVA_HOME to where it is"
    )


def is_connect(spark: SparkSession) -> bool:
    """Whether a session belongs to a Spark Connect server. Such a session has no JVM in reach, and cannot run functions
    of this process.
    """
    return type(spark).__module__.startswith("pyspark.sql.connect")


def make_session(
    master: str | None = None,
    *,
    memory: str = DRIVER_MEMORY,
    settings: dict[str, str] | None = None,
    quick: bool = False,
    name: str = APPLICATION,
) -> SparkSession:
    """Return a Spark session.

    :param master: ``local[N]``, ``spark://HOST:PORT`` or another master; ``sc://HOST:PORT`` is Spark
        Connect. None: all cores of this machine, or the master that spark-submit names.
    :param memory: heap of the driver, if this process starts its Java.
    :param quick: prefer a fast start to throughput, because there is little to compute.
    :raises JavaMissing: no suitable Java was found.
    :raises SparkFailed: the master cannot be reached, or Spark does not start.
    """
    builder = SparkSession.builder.appName(name)
    options = dict(SETTINGS)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    connect = master is not None and master.startswith("sc://")
    if connect:
        assert master is not None
        builder = builder.remote(master)
        options = {key: value for key, value in options.items() if key.startswith("spark.sql.")}
    elif not submitted:
        os.environ["JAVA_HOME"] = str(find_java())
        # Without this variable the workers run whatever PATH calls python3.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(master or "local[*]")
        options["spark.driver.memory"] = memory
        if master is None or master.startswith("local"):
            # Without this variable Java resolves the name of this machine, which may not resolve.
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            options |= LOCAL_SETTINGS | (QUICK_SETTINGS if quick else {})
    for key, value in (options | (settings or {})).items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except (PySparkException, RuntimeError, OSError) as error:
        raise SparkFailed(f"Spark does not start: {str(error).splitlines()[0]}") from None
    except Exception as error:  # The errors of py4j and of grpc have no common base.
        raise SparkFailed(f"Spark does not start: {str(error).splitlines()[0]}") from None
    if not connect:
        session.sparkContext.setLogLevel("FATAL")
        # Python asks Java for these classes by their short names for every column. Without the imports each such
        # question searches all of Spark's archives.
        for asked in ("org.apache.spark.sql.functions", "org.apache.spark.api.python.PythonUtils"):
            java_import(session.sparkContext._jvm, asked)  # noqa: SLF001  # PySpark has no other name for it
    return session
