"""Finished runs in one small file that travels with the pages, so that nothing finished is computed twice elsewhere.

Of a run it holds what tables and figures read: config, summary, the numbers of each round, the mean seconds of each
phase, and the last mixture where clients were mixed. A cell of an attack table is read from its outcome alone, so its
rounds are left out. Where data and network lay is written as `DATA` and `MODEL`, and read as whatever they are here.
"""

from __future__ import annotations

import io
import json
import lzma
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from fedgraft.consortium.attacked import OUTCOME
from fedgraft.consortium.sweep import finished_summary
from fedgraft.core.errors import FedgraftError
from fedgraft.core.files import read_metrics
from reproduction.question import QUESTIONS
from reproduction.runs import dispersion

WHOLE = ("config.toml", "run.json", "summary.json", OUTCOME, "finetuned.json")
SERIES = ("round", "accuracy", "loss", "personal", "balanced_accuracy", "bytes_up", "bytes_down")
_OLDEST = (1980, 1, 1, 0, 0, 0)  # one time for all, so that equal runs make equal files


def pack(root: Path, file: Path, places: Mapping[str, str]) -> int:
    """Add every finished run below `root` to `file`, which stays as it is where it has them all; how many it has."""
    held = _read(file) if file.exists() else {}
    below = sorted({path.parent for path in root.rglob("run.json")})
    new = [
        one for one in below if f"{one.relative_to(root)}/run.json" not in held and finished_summary(one) is not None
    ]
    for folder in new:
        held |= {f"{folder.relative_to(root)}/{name}": _hidden(text, places) for name, text in _parts(folder)}
    if not new:
        return _count(held)
    file.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(whole := io.BytesIO(), "w") as archive:
        for name, content in sorted(held.items()):
            archive.writestr(zipfile.ZipInfo(name, _OLDEST), content)
    beside = file.with_suffix(".tmp")
    # Runs are much alike: compressed together they take half of what they take one by one.
    beside.write_bytes(lzma.compress(whole.getvalue()))
    beside.replace(file)
    return _count(held)


def _count(held: Iterable[str]) -> int:
    return sum(name.endswith("/run.json") for name in held)


def unpack(file: Path, root: Path, places: Mapping[str, str]) -> int:
    """Put runs that are not below `root` there; how many."""
    held = _read(file) if file.exists() else {}
    runs = {name.removesuffix("/run.json") for name in held if name.endswith("/run.json")}
    lacking = {run for run in runs if not (root / run).exists()}
    for name, content in held.items():
        if any(str(folder) in lacking for folder in PurePosixPath(name).parents):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_shown(content, places))
    return len(lacking)


def hours(file: Path) -> dict[str, float]:
    """By question the hours of one core that its runs took, those that chose a learning rate among them."""
    spent: dict[str, float] = {}
    for name, content in (_read(file) if file.exists() else {}).items():
        label, whole = PurePosixPath(name).parent.name.partition("-")[0], name.endswith("/summary.json")
        if whole and label in QUESTIONS:
            spent[label] = spent.get(label, 0.0) + json.loads(content).get("seconds", 0.0) / 3600
    return spent


def _parts(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name in WHOLE:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()
    if not (folder / OUTCOME).is_file():
        lines = shortened(list(read_metrics(folder / "metrics.jsonl")))
        yield "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()
    if mixed := sorted((folder / "figures").glob("crsm-round-*.safetensors")):
        yield f"figures/{mixed[-1].name}", mixed[-1].read_bytes()


def shortened(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what is read of the rounds; the first line carries the mean seconds of each phase over all of them."""
    short = [_short(line) for line in lines]
    phases = dict.fromkeys(phase for line in lines for phase in line.get("seconds", {}))
    means = {}
    for phase in phases:
        spent = [line["seconds"][phase] for line in lines if phase in line.get("seconds", {})]
        means[phase] = sum(spent) / len(spent)
    if means:
        short[0]["seconds"] = means
    return short


def _short(line: dict[str, Any]) -> dict[str, Any]:
    """What is read of a round: its numbers, how uneven weights were, and of the first one how far each client went."""
    made = {key: line[key] for key in SERIES if key in line}
    clients = line.get("clients")
    if (uneven := dispersion(line)) is not None:
        made["dispersion"] = uneven
    if line["round"] == 1 and isinstance(clients, dict) and "drift" in clients:
        made["clients"] = {"drift": clients["drift"]}
    return made


def _read(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(lzma.decompress(file.read_bytes()))) as archive:
        names = archive.namelist()
        if wrong := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise FedgraftError(
                "E-REPRODUCTION-ARCHIVE",
                f"{file} names {wrong[0]!r}, which is outside of it; it is not a file of kept runs",
                name=wrong[0],
            )
        return {name: archive.read(name) for name in names}


def _hidden(content: bytes, places: Mapping[str, str]) -> bytes:
    for word, place in places.items():
        content = content.replace(f'"{place}'.encode(), f'"{word}'.encode())
    return content


def _shown(content: bytes, places: Mapping[str, str]) -> bytes:
    for word, place in places.items():
        content = content.replace(f'"{word}"'.encode(), f'"{place}"'.encode())
        content = content.replace(f'"{word}/'.encode(), f'"{place}/'.encode())
    return content
