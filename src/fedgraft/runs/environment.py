"""The facts about a machine that can explain why two runs of one config differ."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
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


def machine_facts() -> dict[str, Any]:
    """Return Python, packages, processor, threads, revision of the source and the command line, ready for JSON."""
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    packages = {}
    for name in PACKAGES:
        version = installed(name)
        if version:
            packages[name] = version
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "revision": revision(),
        "packages": packages,
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each fact that differs between two `machine_facts` and may change the bytes of a result."""
    facts_that_matter = ("python", "processor", "threads", "gpu", "revision")
    packages_before = before.get("packages", {})
    packages_now = now.get("packages", {})
    return [
        *_changes(facts_that_matter, before, now),
        *_changes(PACKAGES, packages_before, packages_now),
    ]


def _changes(names: Iterable[str], before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each of these names whose value changed."""
    changes = []
    for name in names:
        if before.get(name) != now.get(name):
            changes.append(f"{name} {before.get(name)} -> {now.get(name)}")
    return changes


@cache
def installed(package: str) -> str | None:
    """Return the version of a package without importing it, None if it is not installed.

    Cached, because reading metadata is slow.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor as the system reports it, on Linux in the file `cpuinfo`."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache  # loaded modules stay as they were when they were loaded
def revision(folder: Path | None = None) -> str | None:
    """Return the git revision of the source, with `+changes` when files differ from it; None outside a checkout."""
    if folder is None:
        folder = Path(fedgraft.__file__).parent
    # A package installed inside some other checkout is not part of that checkout.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if head and _git(folder, "status", "--porcelain", "--", "."):
        return f"{head}+changes"
    return head


def _git(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if it fails or there is no git."""
    try:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip()
