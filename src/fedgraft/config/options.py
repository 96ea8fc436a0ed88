"""The options of a run that no other code declares, and the config as a whole.

Nothing here imports torch, so bad input is refused at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from fedgraft.config.data import DataTable, ModelTable, PartitionTable
from fedgraft.config.section import NOT_IN_IDENTITY, ChoiceSection, Section
from fedgraft.config.training import AlgorithmTable, LocalTable, LossTable, ScheduleTable, TrainableTable
from fedgraft.metrics.names import METRIC_NAMES, MetricName


class RoundsTable(Section):
    """How many rounds, who takes part, what is measured."""

    total: int = Field(20, ge=0, description="T; 0: only the head initialisation")
    fraction: float = Field(0.5, gt=0, le=1, description="C, the share of clients in a round")
    sampling: Literal["fixed", "poisson"] = "fixed"
    evaluate_every: int = Field(5, ge=0, description="validation every n rounds (0: only at the end)")
    test: bool = Field(True, description="test the best model at the end; false while settings are still chosen")
    patience: int = Field(0, ge=0, description="stop after so many evaluations without a better accuracy (0: never)")
    min_delta: float = Field(1e-3, ge=0, description="smallest improvement of the accuracy that counts")
    checkpoint_every: int = Field(5, ge=1)
    keep_best: int = Field(
        3,
        ge=1,
        description="checkpoints kept of the best evaluated rounds, beside the last five",
        json_schema_extra=NOT_IN_IDENTITY,
    )
    minimum_answers: int | None = Field(
        None, ge=1, description="fewer accepted responses: the round is skipped (default: 1; in a deployment 2)"
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="seconds that clients have for one request; later responses do not count (default: no limit)",
    )
    enough: int | None = Field(
        None,
        ge=1,
        description="in a deployment: a round ends when so many clients have answered; until the deadline it waits for "
        "nodes that are gone, too (default: it waits for all that are connected)",
    )
    kind: Literal["synchronous", "buffered"] = Field(
        "synchronous",
        description="buffered: the server steps whenever `buffer` answers are there, and slow clients answer later "
        "(FedBuff; docs/buffered)",
    )
    buffer: int | None = Field(
        None, ge=1, description="kind=buffered: answers of a step, at most the clients of a round (required)"
    )
    staleness: float = Field(
        0.5,
        ge=0,
        description="kind=buffered: an update that began s steps ago counts (1 + s)^-staleness; 0: in full",
    )
    norm_bound: float | None = Field(None, gt=0, description="refuse updates of a larger norm")
    norm_factor: float = Field(
        30.0, ge=0, description="refuse updates longer than so many times the median length; 0: none"
    )
    keep_contributions: bool = Field(
        False, description="store the contribution of each client to the model (one vector each), for unlearn --fast"
    )
    personal_memory_mb: float = Field(
        2000,
        ge=0,
        description="mixtures: store the clients' models on disk when they need more; same results",
        json_schema_extra=NOT_IN_IDENTITY,
    )


class PersonalTable(Section):
    """Evaluation of each client on its own test images."""

    evaluate: Literal["never", "end", "always"] = Field("never", description="when clients test on their own images")
    finetune_epochs: int = Field(0, ge=0, description="fine-tune before a second test")
    finetune_part: Literal["head", "body", "both"] = "both"
    finetune_lr: float = Field(1e-3, gt=0, le=1e4)
    finetune_batch: int = Field(50, ge=1)


class CompressionTable(Section):
    """How updates are encoded."""

    codec: Literal["values", "half", "int8", "top_k"] = "values"
    fraction: float = Field(0.01, gt=0, le=1, description="top_k: share of the coordinates sent")


class DifferentialPrivacyTable(Section):
    """Differential privacy of clients or of their images. Give a target epsilon, or the noise itself."""

    unit: Literal["client", "record"] = Field(
        "client",
        description="what is protected: a client with all its images, or each single image (record: every client clips "
        "and noises the gradient of each image)",
    )
    epsilon: float | None = Field(None, gt=0, description="the run stops before it would exceed this")
    noise: float | None = Field(None, gt=0, description="noise multiplier; default: that which the target needs")
    delta: float | None = Field(
        None, gt=0, lt=1, description="default: 1e-5; at most a tenth of 1 / clients, or images"
    )
    clip: float = Field(1.0, gt=0, description="largest norm of a client's update, or of an image's gradient")
    adaptive: bool = Field(False, description="let the bound follow the median of the norms")
    noise_source: Literal["server", "distributed"] = Field(
        "server",
        description="who adds the noise: the server, which is trusted with it, or every client its share inside the "
        "secure sum (distributed; needs aggregation=secure)",
    )
    secret: bool | None = Field(
        None,
        description="noise and cohorts from a secret; else from the seed, repeatable, for experiments (default: secret "
        "in a deployment)",
    )


class PrivacyTable(Section):
    """What the server may see."""

    limit: float = Field(1.0, gt=0, description="secure: largest update of one coordinate; larger ones are clipped")
    threshold: int | None = Field(None, ge=2, description="secure: shares needed to undo a lost client's masks")
    degree: int | None = Field(None, ge=2, description="secure: others that hold a client's shares, in large cohorts")
    smallest_group: int = Field(
        5,
        ge=1,
        description="fewest images of a subgroup (metrics_by) that metrics are told of; secure: of a class at a client "
        "that its sums of scores are about",
    )
    dp: DifferentialPrivacyTable | None = Field(None, description="differential privacy (a table)")
    aggregation: Literal["clear", "secure"] = Field(
        "clear", description="secure: the server sees only the sum of the updates"
    )


class CentralizedTable(Section):
    """`fedgraft centralized`: all data in one place, as the baseline."""

    kind: Literal["probe", "finetune", "ridge"] = "probe"
    active: bool = Field(False, description="set by the command itself")
    epochs: int = Field(20, ge=1)
    patience: int = Field(10, ge=0, description="stop after so many epochs without a better validation accuracy")


class TrackTable(Section):
    """Optional trackers beside the run folder."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    mixing_rounds: tuple[int, ...] = Field(
        (),
        description="mixtures: rounds whose similarity and mixing weights are stored and drawn (default: first, "
        "middle, last)",
    )


class Config(Section):
    """One run."""

    name: str = Field(
        "run", min_length=1, max_length=80, pattern=r"^[A-Za-z0-9._-]+$", json_schema_extra=NOT_IN_IDENTITY
    )
    seed: int = Field(0, ge=0)
    metrics: tuple[MetricName, ...] = Field(
        (), description="what is measured at the end, by class and client, each with a 95 % interval (docs/metrics.md)"
    )
    metrics_by: tuple[str, ...] = Field(
        (),
        description="columns of the data by whose values the metrics are told too, such as sex; where only nodes have "
        "images with the values: sex=F|M; groups smaller than privacy.smallest_group are withheld",
    )
    select: str = Field(
        "accuracy", description="the metric on validation images that chooses the best round; of one class: f1:CLASS"
    )
    device: str = Field(
        "auto",
        description="where this command computes: cpu, cuda, cuda:1, mps, several with commas; auto: FEDGRAFT_DEVICE, "
        "else cuda where there is one, else cpu; not part of the run (docs/devices)",
        json_schema_extra=NOT_IN_IDENTITY,
    )
    engine: Literal["auto", "reference", "batched", "flower-sim"] = Field(
        "auto",
        description="batched: all clients of a linear head in one product, equal within 1e-6; auto: where it can be; "
        "flower-sim: Flower's simulation on Ray, same bytes as reference",
    )
    pack: Literal["auto", "off"] | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description="auto, off, or how many clients train a small edit (LoRA, sparse, head, last blocks) as one "
        "computation, equal within 1e-5; auto: on an accelerator as many as its memory holds, on a CPU none",
    )
    workers: int = Field(
        0,
        ge=0,
        description="processes that train clients side by side; same bytes whatever the number; "
        "0: by rule (docs/speed)",
        json_schema_extra=NOT_IN_IDENTITY,
    )
    data: DataTable = DataTable()
    partition: PartitionTable = PartitionTable()
    model: ModelTable = ModelTable()
    trainable: TrainableTable = TrainableTable()
    local: LocalTable = LocalTable()
    loss: LossTable = LossTable()
    schedule: ScheduleTable = ScheduleTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    rounds: RoundsTable = RoundsTable()
    personal: PersonalTable = PersonalTable()
    compression: CompressionTable = CompressionTable()
    privacy: PrivacyTable = PrivacyTable()
    centralized: CentralizedTable = CentralizedTable()
    track: TrackTable = Field(TrackTable(), json_schema_extra=NOT_IN_IDENTITY)
    policy: dict[str, Any] = Field(
        {},
        description="rules that every request to a client must keep, as in a node's policy.toml: docs/deploy",
        json_schema_extra=NOT_IN_IDENTITY,
    )

    @field_validator("select")
    @classmethod
    def _selectable(cls, value: str) -> str:
        """Refuse a metric that cannot choose the best round (pydantic)."""
        name, _, class_name = value.partition(":")
        selectable = [metric for metric in METRIC_NAMES if metric != "confusion"]
        lacks_class = name in ("sensitivity", "specificity") and not class_name
        if name not in selectable or lacks_class:
            raise ValueError(
                f"select is one of {', '.join(selectable)}, sensitivity and specificity of a class "
                f"(sensitivity:CLASS), not {value!r}"
            )
        return value

    @model_validator(mode="after")
    def _features_need_no_backbone(self) -> Config:
        """Refuse precomputed features with a backbone or with options of images, and the reverse (pydantic)."""
        has_features = self.data.source == "features"
        if has_features != (self.model.name == "features"):
            raise ValueError(
                "precomputed features need no backbone: set data.source=features and model.name=features together"
            )
        if has_features and (self.data.augment or self.data.image_size):
            raise ValueError("precomputed features are no images: leave data.augment and data.image_size out")
        return self

    @property
    def kind(self) -> str:
        """The kind of run in a summary."""
        if self.centralized.active:
            return f"centralised {self.centralized.kind}"
        return "federated"

    @property
    def head(self) -> str:
        """How the head starts; at random under differential privacy, whose accounting covers no sums of data."""
        if self.model.head is not None:
            return self.model.head
        if self.privacy.dp is not None:
            return "random"
        return "ridge"

    @property
    def makes_head(self) -> bool:
        """Whether a head is computed from sums of the clients' data before the first round."""
        return self.head not in ("random", "stored")

    @property
    def table(self) -> dict[str, Any]:
        """Every option, as tables that `validate` takes again; of algorithm and trainable only those that are set.

        An option that is not set means the default of the algorithm.
        """
        table = self.model_dump(mode="json", exclude_none=True)
        algorithm = self.algorithm.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        table["algorithm"] = {"name": self.algorithm.name, **algorithm}
        table["trainable"] = self.trainable.model_dump(mode="json", exclude_none=True, exclude_unset=True)
        return table

    @property
    def digest(self) -> str:
        """Identity of the result: a digest of every option that can change it and differs from its default."""
        return hashlib.blake2b(self._identity, digest_size=8).hexdigest()

    @property
    def fingerprint(self) -> str:
        """The digest, long enough that nobody can make two configs with the same one; owners agree to it."""
        return self.digest + hashlib.sha256(self._identity).hexdigest()[:48]

    @property
    def _identity(self) -> bytes:
        """The text that `digest` and `fingerprint` are digests of: options that can change the result, as JSON."""
        return json.dumps(_changed_options(self), sort_keys=True).encode()


def _changed_options(section: BaseModel) -> dict[str, Any]:
    """Return the options of `section`, and of tables inside it, that differ from their defaults.

    Those declared `NOT_IN_IDENTITY` are left out.
    """
    changed: dict[str, Any] = {}
    dumped = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, Mapping) and extra.get("identity") is False:
            continue
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            inner = _changed_options(value)
            if inner or field.default is None:  # an optional table counts even if it is empty
                changed[name] = inner
        elif value != field.default:
            changed[name] = dumped[name]
    if isinstance(section, ChoiceSection):
        changed |= section.changed_options()
    elif section.model_extra:
        changed |= section.model_extra
    return changed
