"""Configuration of the built documentation."""

from __future__ import annotations

import runpy

from twisted.trial.unittest import SynchronousTestCase

from tests.test_rooms import ROOT


class ConfigurationTests(SynchronousTestCase):
    def test_options_keep_their_hyphens(self) -> None:
        """The letter D makes one dash of ``--``, also in the tables of options."""
        self.assertNotIn("D", runpy.run_path(str(ROOT / "docs" / "conf.py"))["smartquotes_action"].upper())
