"""File with a twin's secret. It has mode 0600, a line with the words or the seed, and a line with the kind of key."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from dmsg.directory_checks import check_state_path
from dmsg.errors import KeyFileError
from dmsg.keys import write_new
from dmsg.rmb.twins.identity import KEY_TYPES, Identity

SECRET = "RMB_SECRET"  # noqa: S105  # the name of a variable
DEFAULT_KEY_TYPE = "sr25519"
MAX_FILE = 4096


@dataclass(frozen=True, repr=False)
class TwinSecret:
    """Secret of a twin: words or a seed, and the kind of signing key that is derived from it."""

    secret: str
    key_type: str = DEFAULT_KEY_TYPE

    def identity(self) -> Identity:
        """Return the signing key.

        :raises IdentityError: the secret is malformed.
        """
        return Identity(self.secret, self.key_type)

    def __repr__(self) -> str:
        return f"<TwinSecret {self.key_type}>"


def read_secret(path: str | None, key_type: str | None = None) -> TwinSecret:
    """Read a secret from a file. If ``path`` is None, read it from the environment variable ``RMB_SECRET``.

    :raises KeyFileError: there is no secret, the file is malformed, or others can read it.
    :raises IdentityError: the secret is malformed.
    """
    if path is None:
        text = os.environ.get(SECRET)
        if not text:
            raise KeyFileError(
                "no twin's secret is given: use --key-file FILE, or put the words into "
                f"the environment variable {SECRET}"
            )
        found = TwinSecret(text.strip(), key_type.lower() if key_type else DEFAULT_KEY_TYPE)
    else:
        found = _from_file(path, key_type)
    found.identity()
    return found


def _from_file(path: str, key_type: str | None) -> TwinSecret:
    try:
        if not Path(path).is_file() and Path(path).exists():
            # Only a regular file is opened, because opening a named pipe would block.
            raise KeyFileError(f"{path or 'an empty name'}: not a regular file")
        with Path(path).open() as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.strip() for line in file.read(MAX_FILE).splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"{path}: {getattr(error, 'strerror', None) or 'not a key file'}") from None
    if not stat.S_ISREG(mode):
        raise KeyFileError(f"{path}: not a regular file")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(f"{path}: is accessible by others (mode {mode & 0o777:04o}); do: chmod 600 {path}")
    secret, kind = "", None
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "type" and rest.strip().lower() in KEY_TYPES:
            kind = rest.strip().lower()
        elif line and not line.startswith("#"):
            secret = secret or line
    if not secret:
        raise KeyFileError(f"{path}: contains neither mnemonic words nor a seed")
    return TwinSecret(secret, key_type.lower() if key_type else kind or DEFAULT_KEY_TYPE)


def write_secret(path: str, secret: TwinSecret) -> None:
    """Write a secret to a new file with mode 0600.

    :raises KeyFileError: the file exists already, or cannot be written.
    """
    try:
        check_state_path(Path(path))
        Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from None
    write_new(
        path, f"# the secret of a twin: whoever knows it can act as the twin\n{secret.secret}\ntype {secret.key_type}\n"
    )
