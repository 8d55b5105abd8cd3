"""Tests of runs that start no Java: ``trial tests.analytics.test_arrow``."""

from __future__ import annotations

import unittest
from unittest.mock import patch

from tests.analytics.suites import fill, missing_package

MODULES = (
    "arrow_files",
    "arrow_stores",
    "arrow_late_files",
    "arrow_copies",
    "arrow_lake",
    "arrow_earlier",
    "arrow_stream",
)


class ArrowSuite(unittest.TestSuite):
    """Tests that fail if they start Spark."""

    def run(self, result: unittest.TestResult, debug: bool = False) -> unittest.TestResult:
        with patch("tests.analytics.support.make_session", side_effect=AssertionError("this test started Spark")):
            return super().run(result, debug)


def testSuite() -> unittest.TestSuite:
    """Return the tests; trial calls this function."""
    return fill(ArrowSuite(), missing_package(), MODULES)
