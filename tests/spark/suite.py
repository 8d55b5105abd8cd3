"""All tests that need Spark, in one process: ``trial tests.spark.suite``."""

from __future__ import annotations

import importlib
import unittest

MODULES = ("spark_tables", "spark_jobs", "spark_report", "spark_oracle")


def testSuite() -> unittest.TestSuite:
    """What trial asks for."""
    loader = unittest.TestLoader()
    suite = unittest.TestSuite()
    for name in MODULES:
        module = importlib.import_module(f"tests.spark.{name}")
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, unittest.TestCase) and one.__module__ == module.__name__:
                suite.addTests(loader.loadTestsFromTestCase(one))
    return suite
