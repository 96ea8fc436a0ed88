"""The facts about a machine that can explain why two runs of one config differ."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fedgraft
from fedgraft.engines.choice import cores

PACKAGES = (
    "fedgraft",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "scipy",
    "pillow",
    "pyarrow",
    "peft",
    "datasets",
    "cryptography",
    "dp-accounting",
    "flwr",
)
"""Packages whose version can change a result."""


def facts() -> dict[str, Any]:
    """Python, packages, processor, threads, revision of the source and the command line, ready for JSON."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "revision": revision(),
        "packages": {name: version for name in PACKAGES if (version := installed(name))},
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What changed between two starts and may change the bytes of a result, one phrase each."""
    found = [
        f"{key} {before.get(key)} -> {now.get(key)}"
        for key in ("python", "processor", "threads", "gpu", "revision")
        if before.get(key) != now.get(key)
    ]
    old, new = before.get("packages", {}), now.get("packages", {})
    return found + [f"{name} {old.get(name)} -> {new.get(name)}" for name in PACKAGES if old.get(name) != new.get(name)]


@cache
def installed(package: str) -> str | None:
    """The version of a package, without importing it; its metadata take longer to read than a small round to train."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system gives it."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache  # what is loaded stays as it was when it was loaded
def revision(folder: Path | None = None) -> str | None:
    """The git revision of the source, with `+changes` when files differ from it; None outside a checkout."""
    folder = folder or Path(fedgraft.__file__).parent
    # A package installed inside some other checkout is not part of that checkout.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    return head and head + ("+changes" if _git(folder, "status", "--porcelain", "--", ".") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
