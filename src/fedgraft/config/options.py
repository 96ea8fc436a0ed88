"""The options of a run: each with its default, its limits and one line of meaning.

Nothing here imports torch, so bad input is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedgraft.config.section import Section
from fedgraft.config.training import AlgorithmChoice, Local, Loss, Schedule, Trainable


class Data(Section):
    """Where the images come from."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    source: str = Field(
        "digits",
        description="digits, cifar10, cifar100, folder, owners (a folder per owner), parquet, npz, datasets, features, "
        "synthetic, or a registered name; its own options stand beside it (image, label, site, group: column names)",
    )
    path: str | None = Field(None, description="file or folder with the data; else the usual places, then the Hub")
    validation: float = Field(0.1, ge=0, lt=1, description="share of the training images held out, stratified")
    image_size: int | None = Field(
        None, ge=4, le=4096, description="pixels the network sees; default: what it was trained on"
    )
    resize: Literal["model", "crop", "squash"] = Field(
        "model", description="how images get the network's size; default: as the network was trained, else crop"
    )
    grey_window: tuple[float, float] | None = Field(
        None, description="grey values of deep images (16 bits and more) shown black and white; default: 0 and 255"
    )
    unreadable: Literal["refuse", "skip"] | None = Field(
        None, description="images that cannot be read: refuse the data (the default), or leave them out and say so"
    )
    augment: tuple[Literal["flip", "crop", "resized_crop", "jitter", "randaugment"], ...] = Field(
        (), description="training transforms, in this order; evaluation never augments"
    )
    normalise: Literal["model", "imagenet", "cifar100"] = Field(
        "model", description="one normalisation for all splits; default: what the network was trained with"
    )
    class_map: dict[str, str] | None = Field(
        None, description="other names for classes, as a table or a TOML file: what is left stands for what is right"
    )
    limit: int | None = Field(None, ge=1, description="use only so many training images, stratified")
    classes: int = Field(10, ge=2, description="synthetic only: number of classes")
    count: int = Field(2000, ge=10, description="synthetic only: number of training images")
    cache_features: bool = Field(True, description="keep the frozen backbone's outputs; equal within 1e-6, much faster")

    @field_validator("class_map", mode="before")
    @classmethod
    def _read_map(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return tomllib.loads(Path(value).read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"the file {value} is no map of class names ({error})") from None


class Partition(Section):
    """How the training images are divided among clients."""

    kind: Literal[
        "iid", "stratified", "classes", "shards", "dirichlet", "dirichlet_balanced", "groups", "by_site"
    ] = Field("stratified", description="by_site: one client per owner, as the data's site column says")  # fmt: skip
    column: str = Field("site", description="kind=by_site: the column of the data that says whose each row is")
    clients: int = Field(10, ge=1, description="K, the number of clients")
    classes_per_client: int = Field(10, ge=1, description="kind=classes: N_c, distinct classes of each client")
    shards_per_client: int = Field(2, ge=1, description="kind=shards: s")
    shard_rule: Literal["sorted", "per_class"] = Field("per_class", description="kind=shards: sort-and-cut or by class")
    alpha: float = Field(0.5, gt=0, description="kind=dirichlet*: concentration, small is uneven")
    minimum: int = Field(10, ge=1, description="kind=dirichlet: least images of a client")
    groups: tuple[tuple[int, ...], ...] = Field((), description="kind=groups: the labels of each group of clients")
    allow_uncovered: bool = Field(False, description="allow classes that nobody holds")
    test: Literal["shard", "all_of_my_classes"] = Field("shard", description="each client's own test images")
    without: tuple[str, ...] = Field(
        (), description="clients, by name or number, that never take part; all others keep their numbers and streams"
    )

    @model_validator(mode="after")
    def _named_groups(self) -> Partition:
        if self.kind == "groups" and not self.groups:
            raise ValueError("kind='groups' needs the labels of each group, for example groups=[[0,1,2],[3,4,5]]")
        return self


class Model(Section):
    """The pretrained network and its head."""

    name: str = Field(
        "nano", description="nano, cnn, features, resnet18[:width=..,norm=group], a transformers folder, or a Hub name"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="before the head")
    head: Literal["ridge", "probe", "ncm", "cof", "random"] | None = Field(
        None,
        description="how the head starts: ridge (Fed3R), logistic probe, class means, FedCOF, at random; default: "
        "ridge, under differential privacy random",
    )
    ridge: float | None = Field(
        None,
        gt=0,
        description="λ of the ridge head, relative to the mean feature energy; default: chosen on validation",
    )
    probe_steps: int = Field(50, ge=1, description="head=probe: full-batch steps on summed gradients")


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
    norm_bound: float | None = Field(None, gt=0, description="refuse changes of a larger norm")
    norm_factor: float = Field(
        30.0, ge=0, description="refuse changes longer than so many times the usual (median) length; 0: none"
    )
    personal_memory_mb: float = Field(
        2000, ge=0, description="mixtures: keep the clients' models on disk when they need more; same results"
    )


class Personal(Section):
    """Evaluation of each client on its own test images."""

    evaluate: Literal["never", "end", "always"] = Field("never", description="when clients test on their own images")
    finetune_epochs: int = Field(0, ge=0, description="fine-tune before a second test")
    finetune_part: Literal["head", "body", "both"] = "both"
    finetune_lr: float = Field(1e-3, gt=0)
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
    clip: float = Field(1.0, gt=0, description="largest norm of a client's change")
    adaptive: bool = Field(False, description="let the bound follow the median of the norms")
    secret: bool | None = Field(
        None,
        description="noise and cohorts from a secret; else from the seed, repeatable, for experiments (default: secret "
        "on other machines)",
    )


class Privacy(Section):
    """Who may see what."""

    limit: float = Field(1.0, gt=0, description="secure: largest change of one coordinate; what is beyond is cut")
    threshold: int | None = Field(None, ge=2, description="secure: shares needed to undo a lost client's masks")
    degree: int | None = Field(None, ge=2, description="secure: others that hold a client's shares, in large cohorts")
    dp: DifferentialPrivacy | None = Field(None, description="client-level differential privacy; a table of its own")
    aggregation: Literal["clear", "secure", "zero_sum_demo"] = Field(
        "clear", description="zero_sum_demo is INSECURE, for comparison"
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
    "accuracy", "top5", "balanced_accuracy", "sensitivity", "specificity", "f1", "auroc", "calibration_error",
    "log_loss", "confusion",
]  # fmt: skip


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
        kept = self.model_dump(mode="json", exclude={"name", "track", "workers", "policy"})
        kept["rounds"].pop("personal_memory_mb")
        later = {"": ("metrics", "select"), "local": ("sampling",), "loss": ("class_weights",), "rounds": ("deadline",),
                 "data": ("class_map", "grey_window"), "partition": ("column", "without")}  # fmt: skip
        for section, names in later.items():  # at its default it says nothing: runs from before it keep their identity
            options, table = (getattr(self, section), kept[section]) if section else (self, kept)
            for name in names:
                if getattr(options, name) == type(options).model_fields[name].default:
                    table.pop(name)
        return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()
