"""Discovery URLs and secret key of a client, from the arguments that a script passes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dmsg.base.urls import check_url
from dmsg.keylock import KeyLock, hold_key, this_program
from dmsg.keys import PubKey, SecKey, load_or_create_key

KeySource = SecKey | str | os.PathLike[str] | None
"""Secret key, or path of a key file, which is created if it is absent; None for a new key without a file."""


class Identity:
    """Discovery and key of one client.

    :param discovery: URL of a discovery, or several URLs; by default those in the environment variable
        ``DMSG_DISCOVERY``.
    :ivar urls: URLs of the discoveries.
    :ivar key: secret key.
    """

    def __init__(self, discovery: str | Sequence[str] | None, key: KeySource) -> None:
        """:raises ValueError: there is no URL of a discovery, or a text is not a URL.
        :raises KeyFileError: the key file cannot be used.
        """
        if discovery is None:
            discovery = os.environ.get("DMSG_DISCOVERY", "")
        self.urls = discovery.split() if isinstance(discovery, str) else list(discovery)
        if not self.urls:
            raise ValueError("a client needs discovery=URL or the variable DMSG_DISCOVERY")
        for url in self.urls:
            check_url(url)
        self._file = None if key is None or isinstance(key, SecKey) else key
        if key is None:
            key = SecKey.generate()
        self.key = key if isinstance(key, SecKey) else load_or_create_key(key)
        self._lock: KeyLock | None = None

    @property
    def public_key(self) -> PubKey:
        """Public key, by which others reach the client."""
        return self.key.public

    def hold(self) -> None:
        """Lock the key file, so that no other program on this machine uses it.

        :raises KeyInUse: another program uses it.
        """
        if self._file is not None:
            self._lock = hold_key(self._file, this_program())

    def release(self) -> None:
        """Unlock the key file. Further calls do nothing."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()
