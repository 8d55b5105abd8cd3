"""Errors of TLS in words that say what to do. OpenSSL is not imported, because that takes a tenth of a second."""

from __future__ import annotations

from dmsg.base.printable import shorten

UNTRUSTED = "no CA that this machine trusts has signed its certificate (SSL_CERT_FILE names the file of a CA of yours)"
OTHER_HOST = "its certificate is for another host"


def tls_error_text(error: BaseException | None) -> str:
    """Return the text for an error of TLS, about the other side; an empty text for an error of another kind."""
    module = type(error).__module__
    if module.partition(".")[0] == "service_identity":
        return OTHER_HOST
    if module != "OpenSSL.SSL" or error is None:
        return ""
    # The argument is OpenSSL's queue of errors: tuples of library, function and reason.
    queue = error.args[0] if error.args and isinstance(error.args[0], list) else []
    reasons = ", ".join(str(one[-1]) for one in queue if isinstance(one, tuple) and one)
    if "certificate verify failed" in reasons:
        return UNTRUSTED
    return f"TLS failed: {shorten(reasons or str(error) or type(error).__name__)}"
