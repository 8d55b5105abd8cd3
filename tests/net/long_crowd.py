"""A thousand clients of one server: ``make long WHICH=operate``."""

from __future__ import annotations

from tests.net import test_faults


class ThousandTests(test_faults.CrowdTests):
    """The crowd of the suite, five times as large."""

    CLIENTS = 1000
