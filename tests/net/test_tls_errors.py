"""Errors of TLS in words."""

from __future__ import annotations

from OpenSSL import SSL
from service_identity import VerificationError
from twisted.trial.unittest import SynchronousTestCase

from dmsg.net.tls_errors import OTHER_HOST, UNTRUSTED, tls_error_text


class TextTests(SynchronousTestCase):
    """Text for each kind of TLS error."""

    def test_each_kind_has_its_words(self) -> None:
        for error, text in (
            (SSL.Error([("SSL routines", "", "certificate verify failed")]), UNTRUSTED),
            (SSL.Error([("SSL routines", "", "wrong version number")]), "TLS failed: wrong version number"),
            (SSL.Error(), "TLS failed: Error"),
            (SSL.ZeroReturnError(), "TLS failed: ZeroReturnError"),
            (VerificationError(errors=[]), OTHER_HOST),
            (OSError("refused"), ""),
            (None, ""),
        ):
            self.assertEqual(tls_error_text(error), text, error)
