"""The options of a run: each with its default, its limits and one line of meaning.

Nothing here imports torch, so bad input is refused at once.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from fedgraft.config.data import Data, Model, Partition
from fedgraft.config.section import Section
from fedgraft.config.training import AlgorithmChoice, Local, Loss, Schedule, Trainable


class Rounds(Section):
    """How long, who takes part, what is measured."""

    total: int = Field(20, ge=0, description="T; 0: only the head initialisation")
    fraction: float = Field(0.5, gt=0, le=1, description="C, the share of clients in a round")
    sampling: Literal["fixed", "poisson"] = "fixed"
    evaluate_every: int = Field(5, ge=0, description="validation every n rounds (0: only at the end)")
    test: bool = Field(True, description="test the best model at the end; false while settings are still chosen")
    patience: int = Field(0, ge=0, description="stop after so many evaluations without a better accuracy (0: never)")
    min_delta: float = Field(1e-3, ge=0, description="what counts as better")
    checkpoint_every: int = Field(5, ge=1)
    minimum_answers: int | None = Field(
        None, ge=1, description="fewer good answers: the round is skipped (default: 1; on other machines 2)"
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="seconds that clients have for one order; later answers do not count (default: no limit)",
    )
    norm_bound: float | None = Field(None, gt=0, description="refuse updates of a larger norm")
    norm_factor: float = Field(
        30.0, ge=0, description="refuse updates longer than so many times the usual (median) length; 0: none"
    )
    keep_contributions: bool = Field(
        False, description="keep what each client added to the model (one vector each), for unlearn --fast"
    )
    personal_memory_mb: float = Field(
        2000, ge=0, description="mixtures: keep the clients' models on disk when they need more; same results"
    )


class Personal(Section):
    """Evaluation of each client on its own test images."""

    evaluate: Literal["never", "end", "always"] = Field("never", description="when clients test on their own images")
    finetune_epochs: int = Field(0, ge=0, description="fine-tune before a second test")
    finetune_part: Literal["head", "body", "both"] = "both"
    finetune_lr: float = Field(1e-3, gt=0, le=1e4)
    finetune_batch: int = Field(50, ge=1)


class Compression(Section):
    """What crosses the wire."""

    codec: Literal["values", "half", "int8", "top_k"] = "values"
    fraction: float = Field(0.01, gt=0, le=1, description="top_k: share of the coordinates sent")


class DifferentialPrivacy(Section):
    """Client-level differential privacy. Give a target epsilon, or the noise itself."""

    epsilon: float | None = Field(None, gt=0, description="the run stops before it would exceed this")
    noise: float | None = Field(None, gt=0, description="noise multiplier; default: what the target needs")
    delta: float | None = Field(None, gt=0, lt=1, description="default: 1e-5; at most a tenth of 1 / clients")
    clip: float = Field(1.0, gt=0, description="largest norm of a client's update")
    adaptive: bool = Field(False, description="let the bound follow the median of the norms")
    secret: bool | None = Field(
        None,
        description="noise and cohorts from a secret; else from the seed, repeatable, for experiments (default: secret "
        "on other machines)",
    )


class Privacy(Section):
    """Who may see what."""

    limit: float = Field(1.0, gt=0, description="secure: largest update of one coordinate; what is beyond is cut")
    threshold: int | None = Field(None, ge=2, description="secure: shares needed to undo a lost client's masks")
    degree: int | None = Field(None, ge=2, description="secure: others that hold a client's shares, in large cohorts")
    dp: DifferentialPrivacy | None = Field(None, description="client-level differential privacy; a table of its own")
    aggregation: Literal["clear", "secure"] = Field(
        "clear", description="secure: the server sees only the sum of the updates"
    )


class Centralized(Section):
    """`fedgraft centralized`: all data in one place, as the baseline."""

    kind: Literal["probe", "finetune", "ridge"] = "probe"
    active: bool = Field(False, description="set by the command itself")
    epochs: int = Field(20, ge=1)
    patience: int = Field(10, ge=0, description="stop after so many epochs without a better validation accuracy")


class Track(Section):
    """Optional trackers beside the run folder."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    mixing_rounds: tuple[int, ...] = Field(
        (), description="mixtures: rounds whose mixing matrix is kept and drawn (default: first, middle, last)"
    )


MetricName = Literal[
    "accuracy",
    "top5",
    "balanced_accuracy",
    "sensitivity",
    "specificity",
    "f1",
    "auroc",
    "calibration_error",
    "log_loss",
    "confusion",
]


class Config(Section):
    """One run."""

    name: str = Field("run", min_length=1, max_length=80, pattern=r"^[A-Za-z0-9._-]+$")
    seed: int = Field(0, ge=0)
    metrics: tuple[MetricName, ...] = Field(
        (), description="what is measured at the end, by class and client, each with a 95 % interval (docs/metrics.md)"
    )
    select: str = Field(
        "accuracy", description="the metric on validation images that chooses the best round; of one class: f1:CLASS"
    )
    device: str = Field("cpu", description="cpu, cuda, cuda:0")
    engine: Literal["auto", "reference", "batched", "flower-sim"] = Field(
        "auto",
        description="batched: all clients of a linear head in one product, equal within 1e-6; auto: where it can be; "
        "flower-sim: Flower's simulation on Ray, same bytes as reference",
    )
    workers: int = Field(
        0,
        ge=0,
        description="processes that train clients side by side; same bytes whatever the number; "
        "0: by rule (docs/speed)",
    )
    data: Data = Data()
    partition: Partition = Partition()
    model: Model = Model()
    trainable: Trainable = Trainable()
    local: Local = Local()
    loss: Loss = Loss()
    schedule: Schedule = Schedule()
    algorithm: AlgorithmChoice = AlgorithmChoice()
    rounds: Rounds = Rounds()
    personal: Personal = Personal()
    compression: Compression = Compression()
    privacy: Privacy = Privacy()
    centralized: Centralized = Centralized()
    track: Track = Track()
    policy: dict[str, Any] = Field(
        {},
        description="rules that every order to a client must keep, as in a node's policy.toml: docs/deploy",
    )

    @field_validator("select")
    @classmethod
    def _selectable(cls, value: str) -> str:
        name, _, of = value.partition(":")
        known = [one for one in get_args(MetricName) if one != "confusion"]
        if name not in known or (name in ("sensitivity", "specificity") and not of):
            raise ValueError(
                f"select is one of {', '.join(known)}, sensitivity and specificity of a class (sensitivity:CLASS), "
                f"not {value!r}"
            )
        return value

    @model_validator(mode="after")
    def _given_features(self) -> Config:
        if (self.data.source == "features") != (self.model.name == "features"):
            raise ValueError(
                "given features need no backbone: set data.source=features and model.name=features together"
            )
        if self.data.source == "features" and (self.data.augment or self.data.image_size):
            raise ValueError("given features are no images: leave data.augment and data.image_size out")
        return self

    @property
    def kind(self) -> str:
        """What a summary calls this run."""
        return f"centralised {self.centralized.kind}" if self.centralized.active else "federated"

    @property
    def head(self) -> str:
        """How the head starts: from sums over the clients, which no account of privacy covers, or at random."""
        return self.model.head or ("ridge" if self.privacy.dp is None else "random")

    @property
    def table(self) -> dict[str, Any]:
        """Every option, as tables that `validate` takes again; of algorithm and trainable only what was said.

        An option that was never said means the algorithm's own default, and a said one must fit the algorithm.
        """
        table = self.model_dump(mode="json", exclude_none=True)
        said = {"mode": "json", "exclude_none": True, "exclude_unset": True}
        table["algorithm"] = {"name": self.algorithm.name, **self.algorithm.model_dump(**said)}  # type: ignore[arg-type]
        table["trainable"] = self.trainable.model_dump(**said)  # type: ignore[arg-type]
        return table

    @property
    def digest(self) -> str:
        """Identity of everything that decides the bytes of the result (not the name, trackers, workers or rules)."""
        return hashlib.blake2b(self._decides, digest_size=8).hexdigest()

    @property
    def fingerprint(self) -> str:
        """The digest, and so much more that nobody can make two configs with the same: what an owner agrees to."""
        return self.digest + hashlib.sha256(self._decides).hexdigest()[:48]

    @property
    def _decides(self) -> bytes:
        kept = self.model_dump(mode="json", exclude={"name", "track", "workers", "policy"})
        kept["rounds"].pop("personal_memory_mb")
        later = {
            "": ("metrics", "select"),
            "local": ("sampling",),
            "loss": ("class_weights",),
            "rounds": ("deadline", "keep_contributions"),
            "data": ("class_map", "grey_window"),
            "partition": ("column", "without", "evaluate_only", "joins", "leaves"),
        }
        for section, names in later.items():  # at its default it says nothing: runs from before it keep their identity
            options, table = (getattr(self, section), kept[section]) if section else (self, kept)
            for name in names:
                if getattr(options, name) == type(options).model_fields[name].default:
                    table.pop(name)
        return json.dumps(kept, sort_keys=True).encode()
