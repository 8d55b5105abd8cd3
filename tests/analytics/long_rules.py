"""The tests of rules by runs over files, with all tables beside DuckDB's (``make long WHICH=pipeline``)."""

from __future__ import annotations

from tests.analytics import spark_lives, spark_self_dealing, spark_settlement
from tests.analytics.support import ByRuns


class CutTests(ByRuns, spark_settlement.CutTests):
    """Three words."""


class LivesTests(ByRuns, spark_lives.LivesTests):
    """Crashes, silence and lost files."""


class LostTransportTests(ByRuns, spark_lives.LostTransportTests):
    """Transports of a server that was killed."""


class PlantedTests(spark_self_dealing.PlantedTests):
    """Self-dealing in other networks."""

    seeds = (2, 3)
