"""What a search goes through: axes of options and their values, from `--over`, and the same for Optuna."""

from __future__ import annotations

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgraft.config.load import known_keys, parse_override, validate
from fedgraft.core.errors import FedgraftError

Setting = Mapping[str, Any]
"""Values by option, as `{"local.lr": 0.1}`."""


@dataclass(frozen=True)
class Axis:
    """One option and the values to try: named ones, or a range `linear`, `log` or `int` from low to high."""

    key: str
    values: tuple[Any, ...] = ()
    scale: str = ""
    low: float = 0.0
    high: float = 0.0

    def distribution(self) -> Any:
        """For Optuna. Named values go by their position: a scale where they are rising numbers, else categories."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.scale == "int":
            return IntDistribution(int(self.low), int(self.high))
        if self.scale:
            return FloatDistribution(self.low, self.high, log=self.scale == "log")
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)
        if numbers and list(self.values) == sorted(self.values):
            return IntDistribution(0, len(self.values) - 1)
        return CategoricalDistribution(list(range(len(self.values))))

    def to_optuna(self, value: Any) -> Any:
        """What Optuna knows a value as."""
        return value if self.scale else self.values.index(value)

    def from_optuna(self, found: Any) -> Any:
        """The value behind what Optuna proposes."""
        return found if self.scale else self.values[found]


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
