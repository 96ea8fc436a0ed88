"""What a run must keep to itself: one secret in a file beside its folder that only its owner can read.

The folder can then be shown: neither the noise, nor the cohorts, nor a signature follow from anything in it.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedgraft.algorithms.algorithm import vary
from fedgraft.core.errors import FedgraftError
from fedgraft.core.state import Federation
from fedgraft.privacy.dp import simulation_key
from fedgraft.run.checkpoint import listing
from fedgraft.run.job import Job


def secret_path(folder: Path) -> Path:
    """Where the secret of a run lies."""
    return folder.absolute().with_name(f".{folder.name}.secret")


def secret_of(folder: Path, needed: bool) -> bytes:
    """The run's secret, made on its first start; a run that is under way and needs its own must have it."""
    path = secret_path(folder)
    try:
        if not path.exists():
            if needed and listing(folder / "checkpoints"):
                raise FedgraftError(f"{path} is missing, and the noise of this run follows from it; restore it.")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(os.urandom(32).hex())
        return bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        raise FedgraftError(f"{path} cannot be used as the run's secret ({error}); restore or delete it.") from error


def unseen(line: dict[str, Any], federation: Federation) -> dict[str, Any]:
    """A round's line without what tells the size of a secret cohort: bytes and seconds; the run's totals remain."""
    if not federation.secret:
        return line
    return {**{name: value for name, value in line.items() if not name.startswith("bytes_")}, "seconds": {}}


def with_secrets(job: Job, secret: bytes) -> Job:
    """The job with noise and cohorts from the run's secret, where its privacy is meant and not an experiment."""
    privacy = job.algorithm.privacy
    if privacy.dp is None or not privacy.dp.bound:
        if privacy.dp is None or privacy.dp.key:
            return job
        made = replace(privacy, dp=replace(privacy.dp, key=simulation_key(job.config.seed)))
        return replace(job, algorithm=vary(job.algorithm, privacy=made))
    noise, cohorts = (hashlib.sha256(f"fedgraft {what}".encode() + secret).digest() for what in ("noise", "cohorts"))
    algorithm = vary(job.algorithm, privacy=replace(privacy, dp=replace(privacy.dp, key=noise)))
    return replace(job, algorithm=algorithm, federation=replace(job.federation, secret=cohorts))
