"""Settings of a Spark session for the amount of work at hand."""

from __future__ import annotations

from pyspark.sql import SparkSession

from dmsg.analytics.session import SETTINGS, SHUFFLE_PARTITIONS, SMALL_SETTINGS, is_connect

LITTLE = {
    # Queries are interpreted, because compiling one takes longer than executing it.
    "spark.sql.codegen.wholeStage": "false",
    # There are few tasks, because a task's overhead exceeds its work; several tables are computed at the same time
    # instead.
    SHUFFLE_PARTITIONS: "1",
    "spark.sql.files.minPartitionNum": "1",
}
"""Spark settings for small jobs."""
FEW = {
    # All rows are in one partition, so that a join without a broadcast needs neither a job of its own nor a shuffle.
    "spark.sql.optimizer.disableHints": "true",
    "spark.sql.autoBroadcastJoinThreshold": "-1",
}
"""Additional settings for small jobs whose rows are all in memory."""
PARTITION_ROWS = 1_000_000
"""Number of events for each partition of a shuffle: their rows fit in the memory of a task (about 150 MB)."""
TASK_ROWS = 100_000
"""Number of events below which another task costs more than it saves."""
_OURS = {one[SHUFFLE_PARTITIONS] for one in (SETTINGS, SMALL_SETTINGS)}


def shuffle_partitions(events: int, cores: int) -> int:
    """Return the number of partitions of a shuffle of that many events.

    The number grows with the data, so that the memory of a task does not.  It also grows with the cores of a cluster,
    as long as each core has enough work.  Spark merges small neighbouring partitions again (adaptive execution).
    """
    return max(int(SETTINGS[SHUFFLE_PARTITIONS]), -(-events // PARTITION_ROWS), min(cores, events // TASK_ROWS))


class Tuning:
    """Switch between the settings for small jobs and those for large ones.

    :param may: whether to use the settings for small jobs at all.
    :ivar may: whether settings for small jobs are used at all.
    :ivar is_small: whether they are in use now.
    """

    def __init__(self, spark: SparkSession, *, may: bool) -> None:
        self._spark = spark
        self.may = may
        self.is_small = may
        self._usual: dict[str, str | None] = {}

    def choose(self, *, small: bool, few: bool = False, events: int = 0) -> None:
        """Choose the settings for a job.

        :param few: whether all rows of a small job are in memory.
        :param events: number of events of a large job, which decides how many partitions a shuffle has. A number of
            partitions that the user has set stays.
        """
        self.is_small = small and self.may
        conf = self._spark.conf
        for name, wanted in (LITTLE | FEW).items():
            usual = self._usual.setdefault(name, conf.get(name, None))
            if self.is_small and (few or name in LITTLE):
                conf.set(name, wanted)
            elif usual is None:
                conf.unset(name)
            elif name == SHUFFLE_PARTITIONS and usual in _OURS:
                conf.set(name, str(shuffle_partitions(events, self._cores())))
            else:
                conf.set(name, usual)

    def _cores(self) -> int:
        """Return the number of cores of the executors; 0 if it is unknown."""
        return 0 if is_connect(self._spark) else self._spark.sparkContext.defaultParallelism
