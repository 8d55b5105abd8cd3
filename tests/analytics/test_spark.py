"""All tests that need Spark, in one process: ``trial tests.analytics.test_spark``."""

from __future__ import annotations

import importlib
import importlib.util
import unittest
from concurrent.futures import ThreadPoolExecutor

from twisted.trial.unittest import SkipTest, SynchronousTestCase

MODULES = (
    # These tests need no Spark. Meanwhile Spark starts.
    "spark_late_files",
    "spark_tables",
    # Spark ends idle Python workers after a minute, so the modules that need workers follow each other.
    "spark_memory",
    "spark_rules",
    "spark_settlement",
    "spark_lives",
    "spark_lake",
    "spark_intake",
    "spark_jobs",
    "spark_late",
    "spark_copies",
    "spark_rewrites",
    "spark_report",
    "spark_archive",
    "spark_tuning",
    "spark_attention",
    "spark_explain",
    "spark_oracle",
    "spark_earlier",
    "spark_sql",
    "spark_self_dealing",
)


class JavaTests(SynchronousTestCase):
    """Stands for all of them where they cannot run."""

    def test_spark(self) -> None:
        """Skip the tests if pyspark or Java is absent."""
        raise SkipTest(missing() or "")


def missing() -> str | None:
    """Why Spark cannot run here."""
    if importlib.util.find_spec("pyspark") is None:
        return 'pyspark is not installed: pip install -e ".[spark,test-spark]"'
    from dmsg.analytics.session import JavaNotFound, find_java

    try:
        find_java()
    except JavaNotFound as error:
        return str(error)
    return None


class SparkSuite(unittest.TestSuite):
    """Tests of which the first need no Spark; it starts while they run."""

    def run(self, result: unittest.TestResult, debug: bool = False) -> unittest.TestResult:
        from tests.analytics.support import make_first_queries

        with ThreadPoolExecutor(1) as pool:
            first_queries = pool.submit(make_first_queries)
            super().run(result, debug)
            first_queries.result()
        return result


def testSuite() -> unittest.TestSuite:
    """Return the tests; trial calls this function."""
    loader = unittest.TestLoader()
    if missing() is not None:
        return loader.loadTestsFromTestCase(JavaTests)
    suite = SparkSuite()
    for name in MODULES:
        module = importlib.import_module(f"tests.analytics.{name}")
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, unittest.TestCase) and one.__module__ == module.__name__:
                suite.addTests(loader.loadTestsFromTestCase(one))
    return suite
