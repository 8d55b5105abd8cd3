"""Messages for TLS errors that tell the user what to do. This module does not import OpenSSL, because that takes a
tenth of a second."""

from __future__ import annotations

from dmsg.base.printable import shorten

UNTRUSTED = "no CA that this machine trusts has signed its certificate (SSL_CERT_FILE names the file of a CA of yours)"
OTHER_HOST = "its certificate is for another host"


def tls_error_text(error: BaseException | None) -> str:
    """Return a message that explains the TLS error with which a connection failed; an empty text for any other
    error."""
    module = type(error).__module__
    if module.partition(".")[0] == "service_identity":
        return OTHER_HOST
    if module != "OpenSSL.SSL" or error is None:
        return ""
    # The first argument is OpenSSL's error queue: a list of tuples of library, function and reason.
    queue = error.args[0] if error.args and isinstance(error.args[0], list) else []
    reasons = ", ".join(str(one[-1]) for one in queue if isinstance(one, tuple) and one)
    if "certificate verify failed" in reasons:
        return UNTRUSTED
    return f"TLS failed: {shorten(reasons or str(error) or type(error).__name__)}"
