"""Spark sessions (local, in a cluster, or by Spark Connect) and the search for a Java to run them on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path
from typing import Any

from py4j.java_gateway import java_import
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from dmsg.analytics.class_archive import usable_archive

JAVA_VERSIONS = (17, 21)
"""Major versions of Java that are accepted: the jobs are tested on 17, and Spark supports 21."""
DRIVER_MEMORY = "1g"
APPLICATION = "dmsg-analytics"

SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # ANSI mode is off, so that an absurd number in an event does not end a run: an expression that cannot be computed
    # gives NULL.
    "spark.sql.ansi.enabled": "false",
    # The JVM never compiles methods above 8,000 bytes of bytecode. Spark generates longer ones by default, which would
    # be interpreted for ever, so their length is limited.
    "spark.sql.codegen.hugeMethodLimit": "8000",
    # There are few partitions, because the tables of a day are small and each partition costs a task.  A run over much
    # data raises this number (dmsg.analytics.tuning).
    SHUFFLE_PARTITIONS: "4",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.io.compression.zstd.level": "1",
    # With this setting a task keeps one open file per partition, instead of sorting its rows by partition first.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.streaming.metricsEnabled": "false",
    # This is off, because otherwise Python reports the source line of every new column to Java, which is half of all
    # calls to Java.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "100",
}
"""Settings of every session; ``--conf`` of spark-submit overrides each."""
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.warehouse.dir": "/nonexistent",
    # The parallel collector has the best throughput; nobody waits for single answers, so its pauses do no harm.
    JAVA_OPTIONS: "-XX:+UseParallelGC",
}


MEDIUM_SETTINGS = {
    # The second JIT compiler is off, because it takes a minute of CPU, which pays only in runs of many minutes
    # (docs/pipeline/running.md).
    JAVA_OPTIONS: "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC",
}
SMALL_SETTINGS = MEDIUM_SETTINGS | {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    SHUFFLE_PARTITIONS: "2",
    "spark.executor.heartbeatInterval": "60s",
    # This is off, because Spark would describe the plan of each query for its web pages, which are switched off.
    "spark.sql.maxPlanStringLength": "0",
}


SMALL_FILES = 8 * 1024 * 1024
"""Bytes of sealed files up to which interpreting a query takes less time than compiling it."""
MEDIUM_FILES = 1024 * 1024 * 1024
"""Bytes of sealed files up to which a run is faster with Java's first JIT compiler alone than with both compilers."""


class Load(Enum):
    """Amount of work for which a Spark session is configured."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"

    @classmethod
    def of_files(cls, size: int | None) -> Load:
        """Return the load for sealed files of that many bytes; None is an unknown size."""
        if size is None or size >= MEDIUM_FILES:
            return cls.LARGE
        return cls.SMALL if size < SMALL_FILES else cls.MEDIUM


_OF_LOAD = {Load.SMALL: SMALL_SETTINGS, Load.MEDIUM: MEDIUM_SETTINGS, Load.LARGE: {}}


_ASKED = (
    ("org.apache.spark.sql", "functions"),
    ("org.apache.spark.api.python", "PythonUtils"),
    ("org.apache.spark.sql.api.python", "PythonSQLUtils"),
    ("org.apache.spark.sql.classic", "SparkSession"),
)
"""Java classes that PySpark looks up again for every column, so that look-ups of them are cached."""


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


def name_files_in_utf8() -> None:
    """Make Java encode file names in UTF-8.  In the locale C, Java would find no file whose name is not ASCII."""
    chosen = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    if re.search("utf-?8", chosen, re.IGNORECASE) is None:
        os.environ["LC_ALL"] = "C.UTF-8"


def is_connect(spark: SparkSession) -> bool:
    """Whether a session belongs to a Spark Connect server. Such a session gives no access to a JVM, and cannot run
    functions of this process.
    """
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _without_submitted(options: dict[str, str]) -> dict[str, str]:
    """Return ``options`` without those that the user has given to spark-submit, because a builder would override
    these."""
    SparkContext._ensure_initialized()  # noqa: SLF001  # PySpark has no other name for it
    given = dict(SparkConf().getAll())
    return {key: value for key, value in options.items() if key not in given}


class _Members:
    """Java class whose members are looked up only once."""

    def __init__(self, java_class: object) -> None:
        self._java_class = java_class

    def __getattr__(self, name: str) -> object:
        found = self.__dict__[name] = getattr(self._java_class, name)
        return found


def _keep_classes(jvm: Any) -> None:
    """Cache the Java classes that Python looks up by name for every column, and their members.

    Each look-up is a call to Java, and one by a short name searches all of Spark's archives.
    """
    for package, name in _ASKED:
        java_import(jvm, f"{package}.{name}")
        kept = _Members(getattr(jvm, name))
        jvm.__dict__.update({name: kept, f"{package}.{name}": kept})


def make_session(
    master: str | None = None,
    *,
    memory: str = DRIVER_MEMORY,
    settings: dict[str, str] | None = None,
    load: Load = Load.LARGE,
    name: str = APPLICATION,
    archives: Path | None = None,
    archive_to: Path | None = None,
) -> SparkSession:
    """Return a Spark session.

    :param master: ``local[N]``, ``spark://HOST:PORT`` or another master; ``sc://HOST:PORT`` is Spark Connect. None
        means all cores of this machine, or the master that spark-submit names.
    :param memory: heap of the driver, if this process starts its Java.
    :param load: amount of work; for little of it, a fast start is better than throughput.
    :param archives: directory in which an archive of classes may be, for a faster start of a local session.
    :param archive_to: file to which Java writes an archive of its classes when it ends.
    :raises JavaMissing: no suitable Java was found.
    :raises SparkFailed: the master cannot be reached, or Spark does not start.
    """
    archive = None
    builder = SparkSession.builder.appName(name)
    options = dict(SETTINGS)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    connect = master is not None and master.startswith("sc://")
    if connect:
        assert master is not None
        builder = builder.remote(master)
        options = {key: value for key, value in options.items() if key.startswith("spark.sql.")}
    elif submitted:
        options = _without_submitted(options)
    else:
        java_home = find_java()
        os.environ["JAVA_HOME"] = str(java_home)
        name_files_in_utf8()
        # The variable names this Python; without it the workers run whatever PATH finds as python3.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(master or "local[*]")
        options["spark.driver.memory"] = memory
        if master is None or master.startswith("local"):
            # The variable gives Java an address; without it Java resolves the name of this machine, which may fail.
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            options |= LOCAL_SETTINGS | _OF_LOAD[load]
            if archive_to is not None:
                options[JAVA_OPTIONS] += f" -XX:ArchiveClassesAtExit={archive_to}"
            elif archives is not None:
                archive = usable_archive(archives, java_home)
            if archive is not None:
                # With an archive that does not fit, Java starts as usual, and these settings suppress its warning.
                options[JAVA_OPTIONS] += (
                    f" -XX:SharedArchiveFile={archive} -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off"
                )
    for key, value in (options | (settings or {})).items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except Exception as error:
        # Exception is caught, because the errors of Spark, py4j and grpc have no common base class.
        if archive is not None:
            # Java exits at once if the file is damaged. Without the archive, the session starts as usual.
            archive.unlink(missing_ok=True)
            return make_session(master, memory=memory, settings=settings, load=load, name=name)
        raise SparkFailed(f"Spark does not start: {str(error).splitlines()[0]}") from None
    if not connect:
        session.sparkContext.setLogLevel("FATAL")
        _keep_classes(session.sparkContext._jvm)  # noqa: SLF001  # PySpark has no other name for it
    return session
