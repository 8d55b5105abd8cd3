"""Creation of Spark sessions (local, in a cluster, or by Spark Connect), and the search for a suitable Java."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from threading import RLock
from typing import Any

from py4j.java_gateway import java_import
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from dmsg.analytics.class_archive import usable_archive

JAVA_VERSIONS = (17, 21)
"""Major versions of Java that are accepted. The jobs are tested on 17, and Spark also supports 21."""
DRIVER_MEMORY = "1g"
APPLICATION = "dmsg-analytics"

SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # ANSI mode is off. An expression that cannot be computed then returns NULL, so an absurd number in an event does
    # not stop a run.
    "spark.sql.ansi.enabled": "false",
    # The JVM never compiles a method of more than 8,000 bytes of bytecode, but only interprets it, which is slow. By
    # default Spark generates longer methods, so the length is limited.
    "spark.sql.codegen.hugeMethodLimit": "8000",
    # There are few partitions, because the tables of a day are small and each partition costs a task.  A run over much
    # data raises this number (dmsg.analytics.tuning).
    SHUFFLE_PARTITIONS: "4",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.parquet.compression.codec": "zstd",
    "spark.io.compression.zstd.level": "1",
    # With this setting, a task opens one file for each partition at the same time, instead of sorting its rows by
    # partition first.
    "spark.sql.maxConcurrentOutputFileWriters": "64",
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.sql.streaming.metricsEnabled": "false",
    # Python does not report the source line of every new column to Java. These reports would be half of all calls to
    # Java.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.sql.streaming.minBatchesToRetain": "100",
}
"""Settings of every session. The option ``--conf`` of spark-submit overrides each of them."""
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
LOCAL_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.warehouse.dir": "/nonexistent",
    # The parallel garbage collector has the best throughput. Its pauses do no harm, because no user waits for single
    # answers.
    JAVA_OPTIONS: "-XX:+UseParallelGC",
}


MEDIUM_SETTINGS = {
    # The second JIT compiler is off, because it takes a minute of CPU time, and saves more than that only in runs of
    # many minutes (docs/pipeline/running.md).
    JAVA_OPTIONS: "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC",
}
SMALL_SETTINGS = MEDIUM_SETTINGS | {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    SHUFFLE_PARTITIONS: "2",
    "spark.executor.heartbeatInterval": "60s",
    # With 0, Spark does not write a description of each query's plan. The descriptions are only for its web pages,
    # which are switched off.
    "spark.sql.maxPlanStringLength": "0",
}


SMALL_FILES = 8 * 1024 * 1024
"""Bytes of sealed files below which a query that Spark interprets takes less time than one that Spark compiles
first."""
MEDIUM_FILES = 1024 * 1024 * 1024
"""Bytes of sealed files below which a run is faster with only Java's first JIT compiler than with both compilers."""


class Load(Enum):
    """Amount of work for which a Spark session is configured."""

    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"

    @classmethod
    def of_files(cls, size: int | None) -> Load:
        """Return the load of a run that reads sealed files.

        :param size: total size of the files in bytes; None if the size is unknown.
        """
        if size is None or size >= MEDIUM_FILES:
            return cls.LARGE
        return cls.SMALL if size < SMALL_FILES else cls.MEDIUM


_SETTINGS_BY_LOAD = {Load.SMALL: SMALL_SETTINGS, Load.MEDIUM: MEDIUM_SETTINGS, Load.LARGE: {}}


_CACHED_CLASSES = (
    ("org.apache.spark.sql", "functions"),
    ("org.apache.spark.api.python", "PythonUtils"),
    ("org.apache.spark.sql.api.python", "PythonSQLUtils"),
    ("org.apache.spark.sql.classic", "SparkSession"),
)
"""Java classes to cache, because PySpark looks them up again for every column."""


JAVA_TIMEOUT = 30
"""Seconds that a Java may take to state its version."""
JAVA_VARIABLES = ("JDK_JAVA_OPTIONS", "JAVA_TOOL_OPTIONS", "_JAVA_OPTIONS")
"""Environment variables with options for every Java. With a wrong option, Java does not start."""


class JavaNotFound(Exception):
    """Error: no Java was found that is suitable for Spark. Its text says what to do."""


class SparkFailed(Exception):
    """Error: no Spark session could be made. Its text says why in one line."""


def _java_version(java: str) -> int | None:
    """Return the version of a Java; None if there is none.

    :raises JavaNotFound: this Java does not start.
    """
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, errors="replace", timeout=JAVA_TIMEOUT, check=False
        )
    except OSError:
        return None
    except subprocess.TimeoutExpired:
        raise JavaNotFound(f"{java} has not answered for {JAVA_TIMEOUT} seconds") from None
    lines = (answer.stderr + answer.stdout).splitlines()
    if found := re.search(r'version "(\d+)', "\n".join(lines)):
        return int(found[1])
    why = next((line for line in lines if line and "Picked up " not in line), f"exit code {answer.returncode}")
    names = [name for name in JAVA_VARIABLES if os.environ.get(name)]
    advice = f"; correct the environment variable {' or '.join(names)}" if names else ""
    raise JavaNotFound(f"{java} does not start: {why}{advice}")


def find_java() -> Path:
    """Return the home of a suitable Java, looking in ``JAVA_HOME``, ``PATH`` and Debian's directories.

    :raises JavaNotFound: no suitable Java was found.
    """
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    if (found := shutil.which("java")) is not None:
        homes.append(Path(found).resolve().parent.parent)
    homes += sorted(Path("/usr/lib/jvm").glob("java-17-*")) + sorted(Path("/usr/lib/jvm").glob("java-21-*"))
    seen = []
    broken: JavaNotFound | None = None
    for home in homes:
        try:
            version = _java_version(str(home / "bin" / "java"))
        except JavaNotFound as error:
            broken = broken or error
            continue
        if version in JAVA_VERSIONS:
            return home
        if version is not None:
            seen.append(f"{version} in {home}")
    if broken is not None:
        raise broken
    there = f"found {', '.join(seen)}; " if seen else ""
    raise JavaNotFound(
        f"Spark needs Java 17: {there}on Debian and Ubuntu `apt-get install openjdk-17-jre-headless`, "
        "or set JAVA_HOME to the directory of a Java 17"
    )


def name_files_in_utf8() -> None:
    """Make Java encode file names in UTF-8.  In the locale C, Java would find no file whose name is not ASCII."""
    chosen = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    if re.search("utf-?8", chosen, re.IGNORECASE) is None:
        os.environ["LC_ALL"] = "C.UTF-8"


def is_connect(spark: SparkSession) -> bool:
    """Whether a session belongs to a Spark Connect server. Such a session has no access to the JVM, and the server
    cannot run functions of this process.
    """
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _without_submitted(options: dict[str, str]) -> dict[str, str]:
    """Return ``options`` without those that the user has passed to spark-submit, because options of a session's builder
    override them."""
    SparkContext._ensure_initialized()  # noqa: SLF001  # PySpark has no other name for it
    given = dict(SparkConf().getAll())
    return {key: value for key, value in options.items() if key not in given}


class _CachedJavaClass:
    """Wrapper of a Java class that caches the class's members, so that each is looked up only once."""

    def __init__(self, java_class: object) -> None:
        self._java_class = java_class

    def __getattr__(self, name: str) -> object:
        found = self.__dict__[name] = getattr(self._java_class, name)
        return found


def _keep_classes(jvm: Any) -> None:
    """Cache the Java classes that PySpark looks up by name for every column, and their members.

    Each look-up is a call to Java, and a look-up by a short name searches all of Spark's archives.
    """
    for package, name in _CACHED_CLASSES:
        java_import(jvm, f"{package}.{name}")
        kept = _CachedJavaClass(getattr(jvm, name))
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
    :param memory: heap size of the driver, if this process starts the driver's Java.
    :param load: amount of work. With little work, the settings favour a fast start over throughput.
    :param archives: directory that may contain an archive of classes, which makes the start of a local session faster.
    :param archive_to: file to which Java writes an archive of its classes when it ends.
    :raises JavaNotFound: no suitable Java was found.
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
        # Spark's workers run the Python of this variable. Without it, they would run any python3 in PATH.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(master or "local[*]")
        options["spark.driver.memory"] = memory
        if master is None or master.startswith("local"):
            # With this variable, Java does not resolve the name of this machine, which may fail.
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
            options |= LOCAL_SETTINGS | _SETTINGS_BY_LOAD[load]
            if archive_to is not None:
                options[JAVA_OPTIONS] += f" -XX:ArchiveClassesAtExit={archive_to}"
            elif archives is not None:
                archive = usable_archive(archives, java_home)
            if archive is not None:
                # If the archive of loaded classes (AppCDS) does not match the present classes, Java starts without the
                # archive. These options suppress Java's warning.
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
            # Java exits at once if the archive is damaged. So the archive is removed, and the session is started
            # without it.
            archive.unlink(missing_ok=True)
            return make_session(master, memory=memory, settings=settings, load=load, name=name)
        raise SparkFailed(f"Spark does not start: {str(error).splitlines()[0]}") from None
    if not connect:
        session.sparkContext.setLogLevel("FATAL")
        _keep_classes(session.sparkContext._jvm)  # noqa: SLF001  # PySpark has no other name for it
    return session


class SparkOnDemand:
    """Spark session that starts when it is first needed. A run without new events does not need it.

    :param start: starts the session.
    :param is_local: whether its executors are in this process.
    :param is_wanted: whether tasks of Spark read and compute however few events there are.
    :ivar is_local: as the parameter.
    :ivar is_wanted: as the parameter.
    """

    def __init__(self, start: Callable[[], SparkSession], *, is_local: bool = True, is_wanted: bool = False) -> None:
        self._start = start
        self.is_local = is_local
        self.is_wanted = is_wanted
        self._session: SparkSession | None = None
        self._at_start: list[Callable[[], None]] = []
        self._starting = RLock()

    @property
    def has_started(self) -> bool:
        """Whether the session has started."""
        return self._session is not None

    @property
    def session(self) -> SparkSession:
        """The session, which is started if it has not started yet.

        :raises SparkFailed: Spark does not start.
        """
        with self._starting:
            if self._session is None:
                self._session = self._start()
                for act in self._at_start:
                    act()
            return self._session

    def at_start(self, act: Callable[[], None]) -> None:
        """Call a function once the session has started."""
        self._at_start.append(act)


Spark = SparkSession | SparkOnDemand
"""Spark session, or one that starts when it is first needed."""


def session_of(spark: Spark) -> SparkSession:
    """Return the session, and start it if necessary."""
    return spark.session if isinstance(spark, SparkOnDemand) else spark


def is_local(spark: Spark) -> bool:
    """Whether the executors are in this process and not on a cluster."""
    if isinstance(spark, SparkOnDemand):
        return spark.is_local
    return not is_connect(spark) and is_local_master(spark.sparkContext.master)


def is_wanted(spark: Spark) -> bool:
    """Whether tasks of Spark read and compute however few events there are."""
    return isinstance(spark, SparkOnDemand) and spark.is_wanted


def is_local_master(master: str | None) -> bool:
    """Whether a Spark master runs the executors in this process. None stands for a local master."""
    return master is None or re.match(r"local(\[|$)", master) is not None
