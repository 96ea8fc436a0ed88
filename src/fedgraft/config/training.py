"""Tables of what trains and how: the edit, local training, the loss, the schedule, the algorithm.

Most options are those of the functions and dataclasses that use them; see `config/section.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedgraft.config.section import NOT_IN_IDENTITY, ChoiceSection, DerivedSection, Section, declared_in
from fedgraft.core.declared import Declared, declared_options, functions_in
from fedgraft.core.registry import GIVEN, algorithm_files


@declared_in("edit/sparse.py", "Sparse", without=("head", "freeze_blocks", "seed"))
class SparseTable(DerivedSection):
    """Which coordinates a sparse edit trains. `sparsity` is always the fraction frozen."""


@declared_in("edit/low_rank.py", "LowRank", without=("head", "freeze_blocks", "seed"))
class LoraTable(DerivedSection):
    """Low-rank adaptation."""


class TrainableTable(Section):
    """What may change."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    kind: str | None = Field(
        None,
        description="everything, head, body, last_blocks, sparse, lora, or a registered name; default: that of the "
        "algorithm (FedBABU: body; FedPer: everything), else the head",
    )
    blocks: int = Field(2, ge=1, description="kind=last_blocks: number of blocks")
    freeze_blocks: int = Field(0, ge=0, description="the first so many blocks, and the layers before them, are frozen")
    head_too: bool | None = Field(
        None,
        description="kind=last_blocks, sparse or lora: train the head too; default: yes, unless the algorithm fixes it",
    )
    match_norm: float | None = Field(
        None, gt=1, description="raise the rate, up to this factor, until updates are as long as dense ones"
    )
    sparse: SparseTable = SparseTable()
    lora: LoraTable = LoraTable()


@declared_in("local/optimizers.py", "sgdm")
@declared_in("local/train.py", "LocalTraining", without=("head_lr", "turns"))
class LocalTable(DerivedSection):
    """How a client trains."""

    optimizer: Literal["sgdm", "adamw"] = "sgdm"
    head_lr: float | None = Field(
        None, gt=0, description="learning rate of the head; default: its own beside a sparse or low-rank edit"
    )

    checkpoint_seconds: float = Field(
        60.0,
        gt=0,
        description="a deployed node saves its progress inside a round so often, and continues there after a crash",
        json_schema_extra=NOT_IN_IDENTITY,
    )

    @field_validator("lr", "head_lr", mode="before", check_fields=False)
    @classmethod
    def _auto(cls, value: Any) -> Any:
        """Return the value; the word `auto` means the default."""
        if value == "auto":
            return None
        return value

    @model_validator(mode="after")
    def _one_unit(self) -> LocalTable:
        """Refuse more than one of steps, steps by client, and epochs (pydantic)."""
        units = [unit for unit in (self.steps, self.epochs, self.client_steps) if unit]
        if len(units) > 1:
            raise ValueError("give one of local.steps, local.client_steps and local.epochs")
        return self


class LossTable(ChoiceSection):
    """What clients minimise; the options of the loss stand beside its name."""

    table: ClassVar[str] = "loss"
    name: str = Field("cross_entropy", description="cross_entropy, calibrated, contrastive, or a registered name")

    @classmethod
    def functions(cls) -> Mapping[str, tuple[Declared, ...]]:
        """Return the options of each loss."""
        return _table_options("local/losses.py", "LOSSES")


class ScheduleTable(ChoiceSection):
    """The learning rate over rounds (or epochs); the options of the schedule stand beside its kind."""

    table: ClassVar[str] = "schedule"
    chosen_by: ClassVar[str] = "kind"
    ignores_others: ClassVar[bool] = True
    kind: str = Field("none", description="none, cosine, linear, lambda, inverse, step, plateau, or a registered name")
    warmup: int = Field(0, ge=0, description="rounds of linear rise, once per run")

    @classmethod
    def functions(cls) -> Mapping[str, tuple[Declared, ...]]:
        """Return the options of each schedule; the rate itself is `local.lr`."""
        return _table_options("local/schedules.py", "SCHEDULES", frozenset({"lr"}))


class AlgorithmTable(ChoiceSection):
    """Which algorithm; its own options stand beside its name, and one that it does not have is refused."""

    table: ClassVar[str] = "algorithm"
    name: str = Field("fedavg", description="see `fedgraft algorithms`")
    weighting: Literal["default", "examples", "uniform"] = Field(
        "default", description="how much a client counts; default: as in the algorithm"
    )
    robust: str = Field(
        "mean",
        description="how updates are combined: mean, median, trimmed_mean, krum, multi_krum, bulyan, geometric_median, "
        "centered_clipping, norm_clip, or a registered rule",
    )
    attackers: int = Field(0, ge=0, description="robust: number of attackers in a cohort to withstand")
    neighbours: bool = Field(False, description="mix each update with its nearest neighbours before the robust rule")
    clip_norm: float | None = Field(None, gt=0, description="clip every update to this norm before combining")

    @classmethod
    def functions(cls) -> Mapping[str, tuple[Declared, ...]]:
        """Return the options of each algorithm of fedgraft; plug-ins check theirs when they are built."""
        return algorithm_options()


@cache
def algorithm_options() -> dict[str, tuple[Declared, ...]]:
    """Return the options of each algorithm of fedgraft by its name."""
    options = {}
    for name, file in algorithm_files().items():
        options[name] = tuple(option for option in declared_options(file, name) if option.name not in GIVEN)
    return options


@cache
def _table_options(file: str, table: str, without: frozenset[str] = frozenset()) -> dict[str, tuple[Declared, ...]]:
    """Return the options of each function in the dict `table` of a source file, by its key there.

    `file` is as "local/losses.py" and is parsed, not imported; options named in `without` are left out.
    """
    options = {}
    for name, function in functions_in(file, table).items():
        options[name] = tuple(option for option in declared_options(file, function) if option.name not in without)
    return options
