"""The options of a run: each with its default, its limits and one line of meaning.

Nothing here imports torch, so bad input is refused at once.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A table of the config; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


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
    cache_features: bool = Field(True, description="keep the frozen trunk's outputs; equal within 1e-6, much faster")

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
    """How the training images are dealt to clients."""

    kind: Literal[
        "iid", "stratified", "classes", "shards", "dirichlet", "dirichlet_balanced", "groups", "by_site"
    ] = Field("stratified", description="by_site: one client per owner, as the data's site column says")  # fmt: skip
    clients: int = Field(10, ge=1, description="K, the number of clients")
    classes_per_client: int = Field(10, ge=1, description="kind=classes: N_c, distinct classes of each client")
    shards_per_client: int = Field(2, ge=1, description="kind=shards: s")
    shard_rule: Literal["sorted", "per_class"] = Field("per_class", description="kind=shards: sort-and-cut or by class")
    alpha: float = Field(0.5, gt=0, description="kind=dirichlet*: concentration, small is uneven")
    minimum: int = Field(10, ge=1, description="kind=dirichlet: least images of a client")
    groups: tuple[tuple[int, ...], ...] = Field((), description="kind=groups: the labels of each group of clients")
    allow_uncovered: bool = Field(False, description="allow classes that nobody holds")
    test: Literal["shard", "all_of_my_classes"] = Field("shard", description="each client's own test images")

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


class Sparse(Section):
    """Which coordinates a sparse edit trains. `sparsity` is always the fraction frozen."""

    strategy: str = Field(
        "least_sensitive",
        description="least_sensitive, most_sensitive, lowest_magnitude, highest_magnitude, random, or another's name",
    )
    sparsity: float = Field(0.9, ge=0, lt=1)
    scope: tuple[str, ...] = Field(
        ("blocks",), description="maskable tensors: blocks, qk, attention, mlp, norm, bias, globs"
    )
    dense: tuple[str, ...] = Field((), description="tensors trained densely beside the mask")
    threshold: Literal["global", "per_tensor", "per_block"] = "global"
    floor: float = Field(0.0, ge=0, lt=1, description="least fraction kept in every tensor; the budget stays exact")
    labels: Literal["true", "sampled", "expected", "rademacher", "logit", "batch_gradient", "single_batch"] = (
        "rademacher"
    )
    samples: int = Field(1024, ge=1, description="images to score, over all clients")
    calibration: Literal["oneshot", "average", "progressive"] = "progressive"
    rounds: int = Field(4, ge=1, description="calibration rounds")
    schedule: Literal["exponential", "linear"] = "exponential"
    soft: float = Field(0.1, ge=0, le=1, description="factor on excluded weights between calibration rounds")
    per_client: bool = Field(False, description="each client has a mask of its own")
    merge: Literal["score_mean", "union", "intersection", "vote"] = "score_mean"
    fill: Literal["count", "zero"] = Field(
        "count", description="per_client: how coordinates few clients train are averaged"
    )
    adaptive_step: float = Field(0.1, gt=0, lt=1, description="adaptive: how much the sparsity rises at a time")
    adaptive_drift: float = Field(0.5, gt=0, description="adaptive: relative drift below which a round counts as calm")
    adaptive_patience: int = Field(2, ge=1, description="adaptive: calm rounds in a row before it rises")
    adaptive_start: float | None = Field(
        None, ge=0, lt=1, description="start at this sparsity and rise to the other as the clients' drift calms down"
    )

    @field_validator("labels", mode="before")
    @classmethod
    def _word(cls, value: Any) -> Any:
        return "true" if value is True else value  # on the command line, true is also a TOML value

    @model_validator(mode="after")
    def _own_masks(self) -> Sparse:
        if self.per_client and self.merge != "score_mean":
            raise ValueError("masks of the clients' own (per_client) are kept, not merged; leave merge at score_mean")
        if self.per_client and self.adaptive_start is not None:
            raise ValueError("adaptive sparsity shrinks one common mask; leave per_client off")
        if self.adaptive_start is not None and self.adaptive_start > self.sparsity:
            raise ValueError("adaptive_start is where the sparsity starts, so it cannot be above sparsity")
        return self


class Lora(Section):
    """Low-rank adaptation."""

    rank: int = Field(8, ge=1)
    alpha: float = Field(16.0, gt=0)
    targets: tuple[str, ...] = ("q", "v")
    dropout: float = Field(0.0, ge=0, lt=1)
    aggregate: Literal["mean", "frozen_a", "alternate", "stack", "residual", "svd", "core"] = Field(
        "mean", description="svd: FlexLoRA; core: Fed-SB, only an r x r matrix between fixed factors trains"
    )
    ranks: tuple[Annotated[int, Field(ge=1)], ...] = Field((), description="svd: ranks of the clients, dealt in turn")
    core_from: Literal["gradient", "weights"] = Field("gradient", description="core: what the fixed factors follow")
    core_images: int = Field(1024, ge=1, description="core_from=gradient: images to take it on, over all clients")


class Trainable(Section):
    """What may change."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    kind: str | None = Field(
        None,
        description="everything, head, body, last_blocks, sparse, lora, or a registered name; default: what the "
        "algorithm says (FedBABU: body; FedPer: everything), else the head",
    )
    blocks: int = Field(2, ge=1, description="kind=last_blocks")
    freeze_blocks: int = Field(0, ge=0, description="the first so many blocks, and what lies before, stay fixed")
    head_too: bool | None = Field(
        None,
        description="kind=last_blocks, sparse or lora: train the head along; default: yes, unless it is to stay",
    )
    match_norm: float | None = Field(
        None, gt=1, description="raise the rate up to this factor, to the dense update's norm"
    )
    sparse: Sparse = Sparse()
    lora: Lora = Lora()


class Local(Section):
    """How a client trains."""

    steps: int | None = Field(None, ge=1, description="J optimizer steps a round (default 4)")
    epochs: int | None = Field(None, ge=1, description="or E passes over the client's images")
    batch_size: int = Field(64, ge=1)
    optimizer: Literal["sgdm", "adamw"] = "sgdm"
    lr: float = Field(0.01, gt=0)
    head_lr: float | None = Field(None, gt=0, description="a rate of its own for the head; default: the same")
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    dampening: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    decoupled: bool = Field(False, description="sgdm: decay the weights instead of the gradient")
    clip: float | None = Field(None, gt=0, description="largest norm of the gradient on what may move")
    momentum_correction: bool = Field(False, description="divide the rate by the momentum's gain over J steps")
    sampling: Literal["uniform", "balanced", "federation"] = Field(
        "uniform",
        description="balanced: draw every class of the client as often; federation: by its rarity among all clients",
    )
    amp: Literal["float16", "bfloat16"] | None = Field(None, description="mixed precision; for GPUs")

    @model_validator(mode="after")
    def _one_unit(self) -> Local:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("give local.steps or local.epochs, not both")
        return self


class Loss(Section):
    """What clients minimise."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    name: str = Field("cross_entropy", description="cross_entropy, or a registered name with options of its own")
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    class_weights: Literal["own", "federation"] | None = Field(
        None, description="rare classes weigh more: by the client's own counts, or by the sum over all clients"
    )


class Schedule(Section):
    """The learning rate over rounds (or epochs)."""

    kind: Literal["none", "cosine", "linear", "lambda", "inverse", "step", "plateau"] = "none"
    minimum: float = Field(0.0, ge=0, description="cosine, linear, plateau")
    restarts: int = Field(0, ge=0, description="cosine")
    decay: float = Field(0.99, gt=0, le=1, description="lambda: factor per round")
    gamma: float = Field(0.1, gt=0, description="inverse")
    power: float = Field(0.5, gt=0, description="inverse")
    at: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field((0.5, 0.75), description="step: fractions of the run")
    factor: float = Field(0.1, gt=0, lt=1, description="step, plateau")
    patience: int = Field(3, ge=0, description="plateau: evaluations to wait")
    warmup: int = Field(0, ge=0, description="rounds of linear rise, once per run")


class AlgorithmChoice(Section):
    """Which algorithm, and its own numbers; one that the algorithm does not have is refused."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: str = Field("fedavg", description="see `fedgraft algorithms`")
    mu: float = Field(0.01, ge=0, description="fedprox")
    alpha: float = Field(0.1, gt=0, description="feddyn")
    server_lr: float | None = Field(None, gt=0, description="server rules; default: the rule's own")
    beta1: float | None = Field(None, ge=0, lt=1, description="server momentum, first moment; default: the rule's")
    beta2: float = Field(0.99, ge=0, lt=1, description="second moment")
    tau: float = Field(1e-3, gt=0, description="adaptivity of adam, yogi, adagrad; agreement threshold of fedgma")
    agreement: float = Field(0.4, ge=0, le=1, description="fedgma: threshold")
    hard: bool = Field(False, description="fedgma: AND mask instead of the soft one")
    pull: float = Field(0.1, ge=0, description="ditto")
    similarity: Literal[
        "cka_linear", "cka_rbf", "cka_debiased", "covariance", "probe_cka", "label_histogram", "groups", "constant",
        "rsa",
    ] = Field("cka_linear", description="fedshibu, fedavg_crsm; groups: 1 with a class in common, else 0")  # fmt: skip
    constant: float = Field(1.0, ge=0, le=1, description="similarity=constant: c")
    samples: int = Field(64, ge=4, description="similarity: images each client represents itself by")
    absent: Literal["keep", "mean"] = Field("keep", description="mixtures: model of clients outside the cohort")
    align: Literal["client", "server", "random"] = Field(
        "client", description="fedalign: who computes the score, or the control"
    )
    gamma: float = Field(1.0, ge=0, description="fedalign: sharpening exponent")
    null_correction: bool = Field(False, description="fedalign: subtract the score of unrelated data")
    cap: float | None = Field(None, gt=0, description="fedalign: largest weight of one client (default 2/m)")
    keep: int = Field(20, ge=2, description="fedalign: directions kept of each layer")
    top: int = Field(20, ge=1, description="fedalign: correlations averaged")
    probe: int = Field(256, ge=16, description="fedalign, probe_cka: shared probe images, from validation")
    layers: tuple[str, ...] = Field(("early", "middle", "late"), description="fedalign: hidden layers by name")
    weighting: Literal["default", "examples", "uniform"] = Field(
        "default", description="how much a client counts; default: as the algorithm says"
    )
    robust: str = Field(
        "mean",
        description="how updates are combined: mean, median, trimmed_mean, krum, multi_krum, bulyan, geometric_median, "
        "norm_clip, or a registered rule",
    )
    attackers: int = Field(0, ge=0, description="robust rules: liars to withstand in a cohort")
    neighbours: bool = Field(False, description="nearest-neighbour mixing before the robust rule")
    clip_norm: float | None = Field(None, gt=0, description="clip every change to this norm before combining")


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
    degree: int | None = Field(None, ge=2, description="secure: neighbours of a client in large cohorts (even)")
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
            raise ValueError("given features need no trunk: set data.source=features and model.name=features together")
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
        """Identity of everything that decides the bytes of the result (not the name, trackers or workers)."""
        kept = self.model_dump(mode="json", exclude={"name", "track", "workers"})
        kept["rounds"].pop("personal_memory_mb")
        later = {"": ("metrics", "select"), "local": ("sampling",), "loss": ("class_weights",), "data": ("class_map",),
                 "rounds": ("deadline",)}  # fmt: skip
        for section, names in later.items():  # at its default it says nothing: runs from before it keep their identity
            options, table = (getattr(self, section), kept[section]) if section else (self, kept)
            for name in names:
                if getattr(options, name) == type(options).model_fields[name].default:
                    table.pop(name)
        return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()
