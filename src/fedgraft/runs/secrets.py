"""What a run must keep to itself: one secret in a file beside its folder that only its owner can read.

The folder can then be shown: neither the noise, nor the cohorts, nor a signature follow from anything in it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedgraft.core.errors import FedgraftError
from fedgraft.core.state import Federation
from fedgraft.core.store import write_atomic
from fedgraft.runs.checkpoint import listing
from fedgraft.runs.setup import SECRET_BYTES


def secret_path(folder: Path) -> Path:
    """Return where the secret of a run lies."""
    return folder.absolute().with_name(f".{folder.name}.secret")


def read_or_draw_secret(folder: Path) -> bytes:
    """Return the run's secret, or a new one that `store_secret` is to write; a damaged file is refused."""
    path = secret_path(folder)
    if not path.exists():
        return os.urandom(SECRET_BYTES)
    try:
        secret = bytes.fromhex(path.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise _unusable(path, str(error)) from error
    if len(secret) != SECRET_BYTES:
        raise _unusable(path, f"it holds {len(secret)} bytes, not {SECRET_BYTES}")
    return secret


def store_secret(folder: Path, secret: bytes, needed: bool) -> None:
    """Write the secret of a run that begins beside its folder; leave an existing file.

    A run that is under way and needs its own (`needed`) must have it already.
    """
    path = secret_path(folder)
    if path.exists():
        return
    if needed and listing(folder / "checkpoints"):
        raise FedgraftError(
            "E-RUN-SECRET-LOST", f"{path} is missing, and the noise of this run follows from it", "restore it"
        )
    try:
        write_atomic(path, [secret.hex().encode()], mode=0o600)
    except OSError as error:
        raise _unusable(path, str(error)) from error


def _unusable(path: Path, reason: str) -> FedgraftError:
    """Return the error for a secret file that cannot be read or written."""
    return FedgraftError(
        "E-RUN-SECRET-DAMAGED",
        f"{path} cannot be used as the run's secret ({reason})",
        "restore it, or delete it if the run has no checkpoint",
        path=str(path),
    )


def without_cohort_size(line: dict[str, Any], federation: Federation) -> dict[str, Any]:
    """Return a round's line without what tells the size of a secret cohort: bytes and seconds; totals remain."""
    if not federation.secret:
        return line
    hidden = {name: value for name, value in line.items() if not name.startswith("bytes_")}
    hidden["seconds"] = {}
    return hidden
