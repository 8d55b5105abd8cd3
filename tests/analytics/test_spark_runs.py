"""Tests of runs with Spark that have events of their own, in one process with one Java: ``trial
tests.analytics.test_spark_runs``.
"""

from __future__ import annotations

import unittest

from tests.analytics.suites import fill, missing_java

MODULES = (
    # Spark ends idle Python workers after a minute, so the modules that need workers follow each other.
    "spark_intake",
    "spark_streams",
    "spark_copies",
    "spark_wanted",
    "spark_receipts",
    "spark_hashes",
    "spark_settlement",
    "spark_lives",
    "spark_rewrites",
    "spark_archive",
    "spark_tuning",
)


def testSuite() -> unittest.TestSuite:
    """Return the tests; trial calls this function."""
    return fill(unittest.TestSuite(), missing_java(), MODULES)
