"""The site's own secret key, under which values of DICOM tags are hashed before they are stored anywhere.

Without the key nobody can test whether a patient is among the hashes: patients' numbers can be tried one by one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import make_private_folder

SITE_KEY = "FEDGRAFT_SITE_KEY"
"""The environment variable with the path of the key; default: `fedgraft/site.key` in the user's folder of settings."""
_KEY_BYTES = 32


def site_key_path() -> Path:
    """Return the path of the site's key."""
    chosen = os.environ.get(SITE_KEY)
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME")
    if base:
        return Path(base) / "fedgraft" / "site.key"
    return Path.home() / ".config" / "fedgraft" / "site.key"


def site_key() -> bytes:
    """Return the site's key; make it, readable by its owner alone, where there is none.

    Raises if others can read it, or if it is not whole.
    """
    path = site_key_path()
    if not path.parent.exists():
        make_private_folder(path.parent)
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
    if path.stat().st_mode & 0o077:
        raise FedgraftError(
            "E-DATA-SITE-KEY-OPEN",
            f"others can read the site's key {path}",
            f"close it with: chmod 600 {path}",
            path=str(path),
        )
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise FedgraftError(
            "E-DATA-SITE-KEY",
            f"{path} is no key of {_KEY_BYTES} bytes",
            "remove it, and another one is made",
            path=str(path),
        )
    return key


def keyed_hash(key: bytes, name: str, value: bytes) -> str:
    """Return the hash of the value of the tag `name` under a site's key, as 32 hexadecimal digits."""
    message = name.encode() + b"\0" + value
    return hashlib.blake2b(message, digest_size=16, key=key).hexdigest()
