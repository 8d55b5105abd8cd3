"""Usage of the plugins: groups, columns, and each option once."""

from __future__ import annotations

import re

from twisted.trial.unittest import SynchronousTestCase

from dmsg.base.options import FLAG, GROUPS, LIMITS, NETWORK, OTHER, Number, Option, Text
from dmsg.tap.usage import usage_of
from tests.docs.option_tables import PLUGINS

ROWS = (
    Option(name="listen", short="l", help="Port to listen on", kind=Text(), default="80", group=NETWORK),
    Option(name="clients", help="Number of clients", kind=Number(1, 9, "clients"), default=4, group=LIMITS),
    Option(name="a-name-that-needs-a-line-of-its-own", help="Say more", kind=FLAG),
)
SHOWN = """
Serves.

Example:
  twistd serve --listen 81

Network:
  -l, --listen=             Port to listen on. [default: 80]

Limits:
      --clients=            Number of clients. [1 to 9 clients; default: 4]

Other:
      --a-name-that-needs-a-line-of-its-own
                            Say more.
"""


class UsageTests(SynchronousTestCase):
    """Usage texts, produced directly."""

    def test_usage_has_groups_defaults_and_units(self) -> None:
        self.assertEqual(usage_of("Serves. Example: twistd serve --listen 81", ROWS, 80), SHOWN)

    def test_usage_fits_the_terminal(self) -> None:
        for width in (60, 80, 200):
            self.assertLessEqual(max(map(len, usage_of("Serves. " * 40, ROWS, width).splitlines())), width)

    def test_each_plugin_shows_each_option_once(self) -> None:
        for name, plugin in PLUGINS.items():
            usage = plugin().getUsage(width=100)
            for row in plugin.rows:
                self.assertEqual(len(re.findall(rf"^  .{{4}}--{row.name}(=|\s|$)", usage, re.M)), 1, (name, row.name))
            self.assertIn("Example:\n  twistd -n ", usage)

    def test_option_help_is_a_sentence(self) -> None:
        """Each help text begins with a capital letter and ends without a full stop, which the usage adds; few options
        have no group.
        """
        for plugin in PLUGINS.values():
            for row in plugin.rows:
                self.assertRegex(row.help, r"^([A-Z]|sqlite).*[^.]$", row.name)
                self.assertIn(row.group, GROUPS)
                self.assertTrue(row.group != OTHER or row.name == "config", row.name)
