"""Tests of the tables that Spark computes from one story, in one process with one Java: ``trial
tests.analytics.test_spark``.
"""

from __future__ import annotations

import unittest

from tests.analytics.suites import fill, missing_java

MODULES = (
    "spark_tables",
    # Spark ends idle Python workers after a minute, so the modules that need workers follow each other.
    "spark_memory",
    "spark_rules",
    "spark_lake",
    "spark_jobs",
    "spark_late",
    "spark_report",
    "spark_attention",
    "spark_explain",
    "spark_oracle",
    "spark_sql",
    "spark_self_dealing",
)


def testSuite() -> unittest.TestSuite:
    """Return the tests; trial calls this function."""
    return fill(unittest.TestSuite(), missing_java(), MODULES)
