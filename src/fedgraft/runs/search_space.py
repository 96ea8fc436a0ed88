"""What a search goes through: axes of options and their values, and who proposes the next setting.

Three ways: a grid, random draws, and Optuna's tree-structured Parzen estimator (Bergstra et al. 2011).
"""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from fedgraft.errors import FedgraftError, MissingExtra
from fedgraft.config.load import Config, known_keys, parse_override, validate
from fedgraft.randomness import derive, numpy_stream

Setting = Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    """One option and the values to try: named ones, or a range `linear`, `log` or `int` from low to high."""

    key: str
    values: tuple[Any, ...] = ()
    scale: str = ""
    low: float = 0.0
    high: float = 0.0


@dataclass
class Trial:
    """One setting, its runs by seed, and what came of them."""

    setting: Setting
    runs: dict[int, Config]
    summaries: dict[int, dict[str, Any]] = field(default_factory=dict)
    pruned: dict[str, Any] | None = None
    """Where and why the median rule stopped it."""
    failed: str = ""

    @property
    def status(self) -> str:
        """`finished`, `pruned`, `failed` or `waiting`."""
        if self.pruned is not None:
            return "pruned"
        return "failed" if self.failed else "finished" if len(self.summaries) == len(self.runs) else "waiting"

    @property
    def label(self) -> str:
        """The setting in words."""
        return " ".join(f"{key}={value}" for key, value in self.setting.items()) or "as it is"

    def scores(self, split: str = "validation") -> list[float]:
        """Accuracies by seed; none for a test set that was left alone."""
        found = [self.summaries[seed] for seed in self.runs if seed in self.summaries]
        return [summary[split]["accuracy"] for summary in found if split in summary]


def parse_axis(word: str) -> Axis:
    """`local.lr=0.01,0.1`, `partition.kind=iid,classes`, or a range such as `local.lr=log:0.001:0.1`."""
    key, _, text = word.partition("=")
    if key not in known_keys():
        validate(parse_override(f"{key or word}=0"))  # says which option is nearest
    if not text:
        raise FedgraftError(f"--over {word} names no values; write for example --over local.lr=0.01,0.1.")
    if key == "seed":
        raise FedgraftError("seeds are not searched but averaged over; give them by --seeds 0,1,2.")
    scale, *ends = text.split(":")
    if scale in {"linear", "log", "int"}:
        return _range(key, scale, ends)
    try:
        values = tuple(tomllib.loads(f"x = [{text}]")["x"])
    except tomllib.TOMLDecodeError:
        values = tuple(_value(key, part.strip()) for part in text.split(","))
    return Axis(key, values)


def _value(key: str, text: str) -> Any:
    table: Any = parse_override(f"{key}={text}")
    for part in key.split("."):
        table = table[part]
    return table


def _range(key: str, scale: str, ends: Sequence[str]) -> Axis:
    try:
        low, high = (float(end) for end in ends)
        good = math.isfinite(low) and math.isfinite(high) and low < high and (scale != "log" or low > 0)
    except ValueError:
        good = False
    if not good or (scale == "int" and not (low.is_integer() and high.is_integer())):
        raise FedgraftError(
            f"the range {key}={':'.join([scale, *ends])} is not of the form {scale}:low:high, for example "
            f"{'int:1:8' if scale == 'int' else scale + ':0.001:0.1'}."
        )
    return Axis(key, (), scale, low, high)


def grid(axes: Sequence[Axis]) -> list[Setting]:
    """Every combination of the values, the last axis fastest."""
    if ranges := [axis.key for axis in axes if axis.scale]:
        raise FedgraftError(f"a grid needs values, and {ranges[0]} is a range; use --search random or optuna.")
    return [dict(zip([a.key for a in axes], row, strict=True)) for row in itertools.product(*(a.values for a in axes))]


def random_settings(axes: Sequence[Axis], seed: int) -> Iterator[Setting]:
    """Independent draws without end; the first n are the same however many follow."""
    stream = numpy_stream(seed, "search")
    while True:
        yield {axis.key: _draw(axis, float(stream.random())) for axis in axes}


def _draw(axis: Axis, u: float) -> Any:
    """The value at the fraction u of an axis."""
    if not axis.scale:
        return axis.values[int(u * len(axis.values))]
    if axis.scale == "log":
        return axis.low * (axis.high / axis.low) ** u
    if axis.scale == "int":
        return int(axis.low + u * (axis.high - axis.low + 1))
    return axis.low + u * (axis.high - axis.low)


def optuna_settings(axes: Sequence[Axis], seed: int, wanted: int, trials: Sequence[Trial]) -> Iterator[Setting]:
    """Optuna's proposals without end, each from what is known of the trials (which may grow) at that time."""
    try:
        import optuna
    except ImportError:
        raise MissingExtra("optuna", "sweep", "--search optuna") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    kinds = {axis.key: _distribution(axis) for axis in axes}
    asked, known = 0, -1
    while True:
        asked, known = (asked + 1 if known == len(trials) else 0), len(trials)
        # A new study each time: the proposal depends on the trials alone, so a resumed search needs no other state.
        sampler = optuna.samplers.TPESampler(
            seed=derive(seed, "optuna", len(trials), asked) % 2**32, n_startup_trials=min(10, 1 + wanted // 4)
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([_told(trial, axes, kinds) for trial in trials])
        found = study.ask(kinds).params
        yield {axis.key: axis.values[found[axis.key]] if axis.values else found[axis.key] for axis in axes}


def _told(trial: Trial, axes: Sequence[Axis], kinds: dict[str, Any]) -> Any:
    """A trial as Optuna sees it."""
    from optuna.trial import TrialState, create_trial

    states = {
        "finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL,
        "waiting": TrialState.RUNNING,
    }  # fmt: skip
    return create_trial(
        state=states[trial.status],
        value=fmean(trial.scores()) if trial.status == "finished" else None,
        params={a.key: a.values.index(trial.setting[a.key]) if a.values else trial.setting[a.key] for a in axes},
        distributions=kinds,
        intermediate_values={trial.pruned["round"]: trial.pruned["accuracy"]} if trial.pruned else None,
    )


def _distribution(axis: Axis) -> Any:
    """Named values are searched by their position: as a scale where they are rising numbers, else as categories."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if axis.scale == "int":
        return IntDistribution(int(axis.low), int(axis.high))
    if axis.scale:
        return FloatDistribution(axis.low, axis.high, log=axis.scale == "log")
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in axis.values)
    if numbers and list(axis.values) == sorted(axis.values):
        return IntDistribution(0, len(axis.values) - 1)
    return CategoricalDistribution(list(range(len(axis.values))))
