"""Runs by what they are: found again when finished, carried out when missing, read for one number.

This is the one file that knows how fedgraft makes and stores runs. A finished run whose config means the same is never
repeated, whatever its name or which preset asked for it; what was interrupted is resumed. A run that fails is said and
left out: it costs its own row a seed, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from fedgraft.config.load import Config, from_folder
from fedgraft.consortium.attacked import OUTCOME
from fedgraft.consortium.sweep import finished_summary, run_many, vary_config
from fedgraft.core.errors import FedgraftError
from fedgraft.runs.folder import RunFolder

__all__ = ["FinishedRuns", "Wanted", "carry_out", "check", "curve", "finished_attacks", "measure_of", "vary_config"]

Report = Callable[[str], None]
Wanted = Mapping[str, tuple[Config, bool]]
"""Configs by label, and whether each is trained in one place."""
Key = tuple[str, bool]
"""What a run is found by: the digest of its config, and whether it was trained in one place."""


class FinishedRuns:
    """The finished runs below a folder, by what their configs mean to today's code."""

    def __init__(self, root: Path) -> None:
        self.found: dict[Key, Path] = {}
        for folder, key in _finished_below(root, "*"):
            self.found.setdefault(key, folder)

    @staticmethod
    def key(config: Config, central: bool) -> Key:
        """What a run is found by."""
        from fedgraft.runs.centralized import as_central

        return (as_central(config).digest if central else config.digest), central

    def get(self, config: Config, central: bool) -> Path | None:
        """The folder of this run, if it is finished."""
        return self.found.get(self.key(config, central))


def finished_attacks(root: Path) -> dict[tuple[str, str], Path]:
    """The finished cells of attack tables below a folder: by attack, and by what their configs mean to today's code."""
    found: dict[tuple[str, str], Path] = {}
    for folder, (digest, _) in _finished_below(root, "attack-*/*/*"):
        if (folder / OUTCOME).exists():  # else it was killed before the model was measured
            found.setdefault((folder.parent.name, digest), folder)
    return found


def _finished_below(root: Path, pattern: str) -> Iterator[tuple[Path, Key]]:
    for path in sorted(root.glob(f"{pattern}/config.toml")):
        if (key := _key_of(path)) is not None:
            yield path.parent, key


_KEYS: dict[tuple[Path, int], Key | None] = {}
"""By config file and when it was written: a finished run stays as it is, and thousands are asked for in every part."""


def _key_of(path: Path) -> Key | None:
    """What a finished run is found by; None where it is not finished, or an option of it is gone."""
    at = path, path.stat().st_mtime_ns
    if at not in _KEYS and finished_summary(path.parent) is not None:
        try:
            config = from_folder(path.parent)
            _KEYS[at] = config.digest, config.centralized.active
        except FedgraftError:
            _KEYS[at] = None
    return _KEYS.get(at)


def carry_out(
    wanted: Wanted, root: Path, processes: int | None, report: Report, known: FinishedRuns | None = None
) -> dict[str, Path]:
    """Run what is missing (nothing where `processes` is None); the folder of each label that has one."""
    known, todo = known or FinishedRuns(root), dict[Key, tuple[str, Config]]()
    for label, (config, central) in wanted.items():
        if (key := FinishedRuns.key(config, central)) not in known.found:
            todo.setdefault(key, (label, config))
    if todo and processes is not None:
        check(next(iter(todo.values()))[1])
        _run(todo, root, processes, report)
        known = FinishedRuns(root)  # hundreds of folders are read, so only where something was added
    found = {label: known.get(config, central) for label, (config, central) in wanted.items()}
    return {label: folder for label, folder in found.items() if folder}


def _run(todo: Mapping[Key, tuple[str, Config]], root: Path, processes: int, report: Report) -> None:
    inside = [label for (_, central), (label, _) in todo.items() if central]
    try:
        run_many(dict(todo.values()), root, processes, inside, report)
    except FedgraftError as error:
        report(f"left out: {error}")


def check(config: Config) -> None:
    """Open device, data and network once, so that what is wrong with them is said once and not by every run."""
    from fedgraft.config.build import build_network
    from fedgraft.config.federate import open_data
    from fedgraft.core.device import choose_devices

    needed = "device"
    hint = "the scale paper is for a GPU"
    try:
        choose_devices(config.device)
        needed = "data"
        hint = "--data says where it is"
        data = open_data(config)
        needed = "model"
        hint = "--model gives its folder"
        build_network(config, data)
    except FedgraftError as error:
        raise FedgraftError("E-REPRODUCTION-RUN", f"{error} ({hint})", needed=needed, cause=error.code) from error


def measure_of(folder: Path, measure: str, target: float | None = None) -> float | None:
    """One number of a finished run."""
    run = RunFolder.open(folder)
    summary = run.summary()
    kind, _, phase = measure.partition(":")
    if kind in {"test", "best"}:
        split = "test" if kind == "test" else "validation"
        return 100 * float(summary[split]["accuracy"]) if split in summary else None
    if kind in {"personal", "finetuned"}:
        value = summary.get("personal", {}).get("mean" if kind == "personal" else "finetuned_mean")
        return None if value is None else 100 * float(value)
    if kind == "balanced":
        # Each client's own test images with the model it would use: one common test set would judge local models on
        # images of clients they never met.
        found = [
            one["balanced_accuracy"]["value"]
            for one in summary.get("clients", {}).values()
            if "balanced_accuracy" in one
        ]
        return 100 * sum(found) / len(found) if found else None
    if kind == "megabytes":
        whole = summary["bytes_up"] + summary["bytes_down"]  # a head of one exchange has no rounds but these bytes
        outside = summary.get("bytes_up_outside_rounds", 0) + summary.get("bytes_down_outside_rounds", 0)
        return (whole - outside or whole) / 1e6
    if measure == "seconds":
        return float(summary["seconds"])
    lines = run.metrics()
    if kind == "seconds":
        spent = [line["seconds"][phase] for line in lines if phase in line.get("seconds", {})]
        return sum(spent) / len(spent) if spent else None
    if kind == "dispersion":
        uneven = [value for line in lines if (value := dispersion(line)) is not None]
        return 100 * sum(uneven) / len(uneven) if uneven else None
    if kind == "spread":  # of the clients' mean steps in round 1, where all settings start from the same model
        first = next((line for line in lines if line["round"] == 1), {})
        drift = first.get("clients", {}).get("drift")
        return drift and sum(d * d for d in drift) / len(drift) / (from_folder(folder).local.steps or 4) ** 2
    if kind == "loss":
        losses = list(_values(lines, "loss").values())
        return losses[-1] if losses and math.isfinite(losses[-1]) else None
    seen = curve(folder)
    if kind == "at":
        return seen.get(int(phase))
    if kind == "rounds_to":
        return next((float(r) for r, a in seen.items() if target is not None and a >= target), None)
    return list(seen.values())[-1] if seen else None


def dispersion(line: Mapping[str, Any]) -> float | None:
    """The standard deviation of the clients' weights in a round over their mean; 0 where all count the same."""
    if "dispersion" in line:
        return float(line["dispersion"])
    weights = line.get("clients", {}).get("weight")
    return pstdev(weights) / fmean(weights) if weights and any(weights) else None


def curve(folder: Path, key: str = "accuracy") -> dict[int, float]:
    """A metric by round, accuracies in percent."""
    factor = 100 if key == "accuracy" else 1
    return {r: factor * v for r, v in _values(RunFolder.open(folder).metrics(), key).items()}


def _values(lines: list[dict[str, Any]], key: str) -> dict[int, float]:
    return {line["round"]: float(line[key]) for line in lines if line.get(key) is not None}
