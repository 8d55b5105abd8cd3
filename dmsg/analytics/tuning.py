"""Settings of a Spark session that depend on the amount of work of a job."""

from __future__ import annotations

from dmsg.analytics.session import (
    SETTINGS,
    SHUFFLE_PARTITIONS,
    SMALL_SETTINGS,
    Spark,
    SparkOnDemand,
    is_connect,
    session_of,
)

SMALL_JOB_SETTINGS = {
    # Queries are interpreted, because compiling a query takes longer than executing it.
    "spark.sql.codegen.wholeStage": "false",
    # There are few tasks, because the overhead of a task exceeds its work. Instead, several tables are computed at the
    # same time.
    SHUFFLE_PARTITIONS: "1",
    "spark.sql.files.minPartitionNum": "1",
}
"""Spark settings for small jobs."""
IN_MEMORY_SETTINGS = {
    # Broadcasts are off. All rows are in one partition, so a join without a broadcast needs no shuffle, while a
    # broadcast would be a separate job.
    "spark.sql.optimizer.disableHints": "true",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}
"""Additional settings for small jobs whose rows are all in memory."""
PARTITION_ROWS = 1_000_000
"""Maximum number of events for each partition of a shuffle. Their rows fit in the memory of a task (about 150 MB)."""
TASK_ROWS = 100_000
"""Minimum number of events of a task. With fewer, the overhead of another task exceeds the time that it saves."""
_OWN_PARTITION_COUNTS = {one[SHUFFLE_PARTITIONS] for one in (SETTINGS, SMALL_SETTINGS)}


def shuffle_partitions(events: int, cores: int) -> int:
    """Return the number of partitions of a shuffle of that many events.

    The number grows with the data, so that the memory of a task does not grow. It also grows with the number of cores,
    as long as each core has enough work. With adaptive execution, Spark merges neighbouring partitions that turn out to
    be small.
    """
    return max(int(SETTINGS[SHUFFLE_PARTITIONS]), -(-events // PARTITION_ROWS), min(cores, events // TASK_ROWS))


class Tuning:
    """Switch between the settings for small jobs and those for large jobs.

    :ivar can_be_small: whether the settings for small jobs may be used at all.
    :ivar is_small: whether the settings for small jobs are in use.
    """

    def __init__(self, spark: Spark, *, can_be_small: bool) -> None:
        self._spark = spark
        self.can_be_small = can_be_small
        self.is_small = can_be_small
        self._usual: dict[str, str | None] = {}
        self._job: tuple[bool, int] | None = None
        if isinstance(spark, SparkOnDemand):
            spark.at_start(self._apply)

    def choose(self, *, small: bool, in_memory: bool = False, events: int = 0) -> None:
        """Choose the settings for a job.

        :param in_memory: whether all rows of a small job are in memory.
        :param events: number of events of a large job. It decides the number of partitions of a shuffle, unless the
            user has set this number.
        """
        self.is_small = small and self.can_be_small
        self._job = in_memory, events
        if not isinstance(self._spark, SparkOnDemand) or self._spark.has_started:
            self._apply()

    def _apply(self) -> None:
        """Apply the settings that were chosen last."""
        if self._job is None:
            return
        in_memory, events = self._job
        conf = session_of(self._spark).conf
        for name, wanted in (SMALL_JOB_SETTINGS | IN_MEMORY_SETTINGS).items():
            usual = self._usual.setdefault(name, conf.get(name, None))
            if self.is_small and (in_memory or name in SMALL_JOB_SETTINGS):
                conf.set(name, wanted)
            elif usual is None:
                conf.unset(name)
            elif name == SHUFFLE_PARTITIONS and usual in _OWN_PARTITION_COUNTS:
                conf.set(name, str(shuffle_partitions(events, self._cores())))
            else:
                conf.set(name, usual)

    def _cores(self) -> int:
        """Return the total number of cores of all executors; 0 if it is unknown."""
        session = session_of(self._spark)
        return 0 if is_connect(session) else session.sparkContext.defaultParallelism
