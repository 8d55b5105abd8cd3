"""Configuration of the built documentation."""

from __future__ import annotations

import ast

from twisted.trial.unittest import SynchronousTestCase

from tests.test_rooms import ROOT


class ConfigurationTests(SynchronousTestCase):
    def test_options_keep_their_hyphens(self) -> None:
        """The letter D makes one dash of ``--``, also in the tables of options."""
        # The file is not run, because it needs Spark, and writes a page.
        settings = {
            target.id: one.value
            for one in ast.parse((ROOT / "docs" / "conf.py").read_text()).body
            if isinstance(one, ast.Assign)
            for target in one.targets
            if isinstance(target, ast.Name)
        }
        self.assertNotIn("D", str(ast.literal_eval(settings["smartquotes_action"])).upper())
