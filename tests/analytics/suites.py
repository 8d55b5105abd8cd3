"""Suites of the tests of the pipeline. trial finds them in ``test_arrow``, ``test_spark`` and ``test_spark_runs``."""

from __future__ import annotations

import importlib
import importlib.util
import unittest
from collections.abc import Iterable

from twisted.trial.unittest import SkipTest, SynchronousTestCase


def missing_package() -> str | None:
    """Return why the pipeline cannot run here, with or without Java."""
    if importlib.util.find_spec("pyspark") is None:
        return 'pyspark is not installed: pip install -e ".[spark,test-spark]"'
    return None


def missing_java() -> str | None:
    """Return why Spark cannot run here."""
    if (missing := missing_package()) is not None:
        return missing
    from dmsg.analytics.session import JavaNotFound, find_java

    try:
        find_java()
    except JavaNotFound as error:
        return str(error)
    return None


def fill(suite: unittest.TestSuite, missing: str | None, modules: Iterable[str]) -> unittest.TestSuite:
    """Add the tests of some modules of this package to a suite, in this order. Return the suite.

    :param missing: why the tests cannot run here; one skipped test then stands for all of them.
    """
    loader = unittest.TestLoader()
    if missing is not None:
        reason = missing

        class AbsentTests(SynchronousTestCase):
            def test_absent(self) -> None:
                raise SkipTest(reason)

        return loader.loadTestsFromTestCase(AbsentTests)
    for name in modules:
        module = importlib.import_module(f"tests.analytics.{name}")
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, unittest.TestCase) and one.__module__ == module.__name__:
                suite.addTests(loader.loadTestsFromTestCase(one))
    return suite
