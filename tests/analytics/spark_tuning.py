"""Settings that follow from the amount of work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from twisted.trial.unittest import SynchronousTestCase

from dmsg.analytics import broadcasts
from dmsg.analytics.session import SHUFFLE_PARTITIONS, SparkOnDemand, is_local, is_local_master
from dmsg.analytics.tuning import IN_MEMORY_SETTINGS, SMALL_JOB_SETTINGS, Tuning, shuffle_partitions
from tests.analytics.support import spark


class Conf:
    """The properties of a session, as Spark's own object has them."""

    def __init__(self, **given: str) -> None:
        self.values: dict[str, str] = {"spark.sql.codegen.wholeStage": "true", **given}

    def get(self, name: str, default: str | None = None) -> str | None:
        return self.values.get(name, default)

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def unset(self, name: str) -> None:
        self.values.pop(name, None)


class TuningTests(SynchronousTestCase):
    """Number of tasks of a shuffle, and precedence of settings."""

    def tuning(self, partitions: str, cores: int, *, can_be_small: bool = True) -> tuple[Tuning, Conf]:
        conf = Conf(**{SHUFFLE_PARTITIONS: partitions})
        session: Any = SimpleNamespace(conf=conf, sparkContext=SimpleNamespace(defaultParallelism=cores))
        return Tuning(cast(Any, session), can_be_small=can_be_small), conf

    def test_partitions_grow_with_the_data_and_the_cores(self) -> None:
        for events, cores, expected in (
            (0, 2, 4),
            (4_500_000, 2, 5),
            (45_000_000, 2, 45),
            (4_500_000, 200, 45),
            (45_000_000, 200, 200),
            (2_500_000_000, 200, 2500),
        ):
            self.assertEqual(shuffle_partitions(events, cores), expected, (events, cores))

    def test_a_session_is_switched_and_switched_back(self) -> None:
        tuning, conf = self.tuning("4", 100)
        before = dict(conf.values)
        tuning.choose(small=True, in_memory=True)
        self.assertEqual(
            {name: conf.values[name] for name in SMALL_JOB_SETTINGS | IN_MEMORY_SETTINGS},
            SMALL_JOB_SETTINGS | IN_MEMORY_SETTINGS,
        )
        tuning.choose(small=True)
        self.assertEqual(conf.values, before | SMALL_JOB_SETTINGS)
        tuning.choose(small=False, in_memory=True)
        self.assertEqual(conf.values, before)
        tuning.choose(small=False, events=50_000_000)
        self.assertEqual(conf.values, {**before, SHUFFLE_PARTITIONS: "100"})

    def test_what_the_user_has_set_stays(self) -> None:
        tuning, conf = self.tuning("300", 100)
        tuning.choose(small=False, events=50_000_000)
        self.assertEqual(conf.values[SHUFFLE_PARTITIONS], "300")

    def test_a_session_that_starts_later_has_the_settings_chosen_last(self) -> None:
        conf = Conf(**{SHUFFLE_PARTITIONS: "4"})
        session: Any = SimpleNamespace(conf=conf, sparkContext=SimpleNamespace(defaultParallelism=2))
        spark = SparkOnDemand(lambda: cast(Any, session))
        tuning = Tuning(spark, can_be_small=True)
        tuning.choose(small=False, events=50_000_000)
        tuning.choose(small=True)
        self.assertTrue(tuning.is_small)
        self.assertFalse(spark.has_started)
        self.assertIs(spark.session, session)
        self.assertEqual({name: conf.values[name] for name in SMALL_JOB_SETTINGS}, SMALL_JOB_SETTINGS)

    def test_a_cluster_is_not_local(self) -> None:
        """The executors of a cluster compute whole days, and the driver does not."""
        found = {one: is_local_master(one) for one in (None, "local", "local[2]", "local-cluster[2,1,1024]", "yarn")}
        self.assertEqual([one for one, local in found.items() if local], [None, "local", "local[2]"])
        self.assertTrue(is_local(spark()))
        self.assertFalse(is_local(SparkOnDemand(spark, is_local=False)))

    def test_settings_for_small_jobs_can_be_refused(self) -> None:
        tuning, conf = self.tuning("4", 2, can_be_small=False)
        tuning.choose(small=True)
        self.assertFalse(tuning.is_small)
        self.assertEqual(conf.values[SHUFFLE_PARTITIONS], "4")


class BroadcastTests(SynchronousTestCase):
    """Rows that grow with traffic are sent to every executor only if they are few."""

    def setUp(self) -> None:
        conf = spark().conf
        for name, value in (("spark.sql.optimizer.disableHints", "false"), ("spark.sql.maxPlanStringLength", "10000")):
            self.addCleanup(conf.set, name, str(conf.get(name)))
            conf.set(name, value)

    def marked(self, rows: int, events: int) -> bool:
        joined = broadcasts.bounded(events)(spark().range(rows))
        plan = cast(Any, joined)._jdf.queryExecution().analyzed().toString()
        return "broadcast" in plan

    def test_rows_are_counted_where_there_may_be_many(self) -> None:
        self.patch(broadcasts, "FEW_ROWS", 100)
        self.patch(broadcasts, "FEW_EVENTS", 1000)
        self.assertTrue(self.marked(100, 1001))
        self.assertFalse(self.marked(101, 1001))
        # So few events cannot make too many rows. Counting the rows would cost a job.
        self.assertTrue(self.marked(101, 1000))
