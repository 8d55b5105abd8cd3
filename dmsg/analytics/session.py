"""A Spark session: on this machine, in a cluster, or by Spark Connect; and the Java for it."""

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
"""Releases of Java on which the jobs are tried (17) or are known to run (21)."""
DRIVER_MEMORY = "1g"
APPLICATION = "dmsg-analytics"

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # an event with an absurd number must not end a run: what cannot be computed is NULL
    "spark.sql.ansi.enabled": "false",
    # Java never compiles longer methods; Spark makes such ones by default, and then they are interpreted for ever
    "spark.sql.codegen.hugeMethodLimit": "8000",
    # a handful of partitions: the tables of a day are small, each partition costs a task
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.io.compression.zstd.level": "1",
    # one file a partition and task without sorting for it first
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.streaming.metricsEnabled": "false",
    # else every column that is made tells Java from which line: half of all that Python asks of it
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "100",
}
"""For any session; each may be changed by ``--conf``."""
LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.warehouse.dir": "/nonexistent",
    # work that is done in bulk and has no one waiting for its answers
    "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",
}


QUICK_SETTINGS = {
    # the second compiler of Java takes seconds that only minutes of work give back
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.executor.heartbeatInterval": "60s",
}


class JavaMissing(Exception):
    """There is no Java that Spark runs on; the text says how to get one."""


class SparkFailed(Exception):
    """No session could be had; the text says why in one line."""


def _java_version(java: str) -> int | None:
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None
    found = re.search(r'version "(\d+)', answer.stderr + answer.stdout)
    return int(found[1]) if found else None


def find_java() -> Path:
    """The home of a Java that will do: ``JAVA_HOME``, ``PATH``, Debian's directories.

    :raises JavaMissing: there is none.
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
    """Whether it is the session of a Spark Connect server: then nothing of Java is here, and functions of this
    process cannot run in it."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def make_session(
    master: str | None = None,
    *,
    memory: str = DRIVER_MEMORY,
    settings: dict[str, str] | None = None,
    quick: bool = False,
    name: str = APPLICATION,
) -> SparkSession:
    """A session.

    :param master: ``local[N]``, ``spark://HOST:PORT`` or another master; ``sc://HOST:PORT`` is Spark
        Connect.  None: all cores of this machine, or what spark-submit says.
    :param memory: of the driver, when this process starts its Java.
    :param quick: there is little to do: what takes long to start is left out.
    :raises JavaMissing: there is no Java to run it on.
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
        # workers take what PATH calls python3, unless they are told
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(master or "local[*]")
        options["spark.driver.memory"] = memory
        if master is None or master.startswith("local"):
            # else Java looks up the name of this machine, which need not lead anywhere
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            options |= LOCAL_SETTINGS | (QUICK_SETTINGS if quick else {})
    for key, value in (options | (settings or {})).items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except (PySparkException, RuntimeError, OSError) as error:
        raise SparkFailed(f"Spark does not start: {str(error).splitlines()[0]}") from None
    except Exception as error:  # py4j's errors, and those of grpc
        raise SparkFailed(f"Spark does not start: {str(error).splitlines()[0]}") from None
    if not connect:
        session.sparkContext.setLogLevel("FATAL")
        # each column that is made asks Java for these by their short names: else all of Spark's archives are searched
        for asked in ("org.apache.spark.sql.functions", "org.apache.spark.api.python.PythonUtils"):
            java_import(session.sparkContext._jvm, asked)  # noqa: SLF001  # PySpark has no other name for it
    return session
