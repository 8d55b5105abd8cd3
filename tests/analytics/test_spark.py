"""Tests that need Spark, in one process with one Java: ``trial tests.analytics.test_spark``."""

from __future__ import annotations

import unittest

from tests.analytics.suites import fill, missing_java

MODULES = (
    "spark_tables",
    # Spark ends idle Python workers after a minute, so the modules that need workers follow each other.
    "spark_memory",
    "spark_hashes",
    "spark_wanted",
    "spark_receipts",
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
    "spark_streams",
    "spark_sql",
    "spark_self_dealing",
)


def testSuite() -> unittest.TestSuite:
    """Return the tests; trial calls this function."""
    return fill(unittest.TestSuite(), missing_java(), MODULES)
