"""Modules of other packages that are loaded when they are used."""

from __future__ import annotations

import subprocess
import sys

from twisted.trial.unittest import SynchronousTestCase

BEGIN = """
import sys
from dmsg.base.postponed_imports import POSTPONED_MODULES, postpone_imports
postpone_imports()
"""
USES = """
postpone_imports()
from twisted.internet import reactor, ssl
import twisted.internet.ssl
import cryptography.x509
import twisted.protocols.tls
from cryptography import x509
from http import cookiejar
shown = ("service_identity", "urllib.request", "cryptography.x509.base")
print(*(name in sys.modules for name in shown))
print(type(ssl.optionsForClientTLS("example.org")).__name__, cookiejar.CookieJar.__name__, x509.Name([]).public_bytes())
print(*(name in sys.modules for name in shown), *(type(module).__name__ for module in (ssl, x509, cookiejar)))
print(hasattr(x509, "no_such_name"), cookiejar.__spec__.loader.get_filename() == cookiejar.__file__)
"""
"""Prints which modules are loaded after the import of Twisted's reactor, and after the postponed modules were used."""
PARTS_FIRST = """
from cryptography.x509.oid import NameOID
from cryptography.x509 import NameAttribute
print(NameAttribute(NameOID.COMMON_NAME, "alice").rfc4514_string())
"""
FAILS_ONCE = """
import builtins
from http import cookiejar
real, builtins.__import__ = builtins.__import__, None
try:
    cookiejar.CookieJar
except TypeError:
    print("failed")
builtins.__import__ = real
print(cookiejar.CookieJar.__name__)
"""
THREADS = """
import threading
from cryptography import x509
found = []
threads = [threading.Thread(target=lambda: found.append(x509.ExtensionNotFound.__name__)) for _ in range(20)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(len(found), set(found))
"""


class PostponedImportTests(SynchronousTestCase):
    def printed(self, code: str) -> list[str]:
        """Return the lines that ``code`` prints in a process of its own."""
        ran = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=False)
        self.assertEqual(ran.stderr, "")
        return ran.stdout.splitlines()

    def test_modules_are_loaded_when_they_are_used(self) -> None:
        self.assertEqual(
            self.printed(USES),
            [
                "False False False",
                "ClientTLSOptions CookieJar b'0\\x00'",
                "True True True module module module",
                "False True",
            ],
        )

    def test_a_part_of_a_package_may_be_imported_before_the_package_is_used(self) -> None:
        self.assertEqual(self.printed(PARTS_FIRST), ["CN=alice"])

    def test_a_failed_load_is_repeated_at_the_next_use(self) -> None:
        self.assertEqual(self.printed(FAILS_ONCE), ["failed", "CookieJar"])

    def test_threads_wait_until_the_module_is_loaded(self) -> None:
        self.assertEqual(self.printed(THREADS), ["20 {'ExtensionNotFound'}"])
