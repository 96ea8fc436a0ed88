"""The options of what trains and how: the edit, local training, the loss, the rate over rounds, the algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedgraft.config.section import Section


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

    budgets: tuple[Annotated[int, Field(ge=4)], ...] = Field(
        (), description="bytes of the clients' updates, dealt in turn; each trains the part of the mask that fits"
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
        if self.budgets and (self.per_client or self.adaptive_start is not None):
            raise ValueError("budgets cut one common mask to size; leave per_client and adaptive_start out")
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
    budgets: tuple[Annotated[int, Field(ge=4)], ...] = Field(
        (), description="svd: bytes of the clients' updates, dealt in turn; each trains the rank that fits"
    )
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
    client_steps: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="steps by client, dealt in turn, where some can afford fewer; see fednova"
    )
    epochs: int | None = Field(None, ge=1, description="or E passes over the client's images")
    batch_size: int = Field(64, ge=1)
    optimizer: Literal["sgdm", "adamw"] = "sgdm"
    lr: float | None = Field(
        None, gt=0, description="learning rate; default (or 'auto'): what suits what trains (docs/defaults)"
    )
    head_lr: float | None = Field(
        None, gt=0, description="a rate of its own for the head; default: its own beside a sparse or low-rank edit"
    )
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

    @field_validator("lr", "head_lr", mode="before")
    @classmethod
    def _auto(cls, value: Any) -> Any:
        return None if value == "auto" else value

    @model_validator(mode="after")
    def _one_unit(self) -> Local:
        if sum(map(bool, (self.steps, self.epochs, self.client_steps))) > 1:
            raise ValueError("give local.steps, local.client_steps or local.epochs, one of them")
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
        "cka_linear",
        "cka_rbf",
        "cka_debiased",
        "covariance",
        "probe_cka",
        "label_histogram",
        "groups",
        "constant",
        "rsa",
        "learned",
    ] = Field(
        "cka_linear",
        description="fedshibu, fedavg_crsm; groups: 1 with a class in common, else 0; learned: the "
        "self-weight that does best on images each client sets aside",
    )
    constant: float = Field(1.0, ge=0, le=1, description="similarity=constant: c")
    samples: int = Field(64, ge=4, description="similarity: images each client represents itself by")
    absent: Literal["keep", "mean"] = Field("keep", description="mixtures: model of clients outside the cohort")
    self_weight: float | None = Field(
        None, ge=0, le=1, description="similarity=learned: fixed instead, the same for all"
    )
    aside: float = Field(0.2, gt=0, lt=1, description="similarity=learned: share of a client's images to learn it on")
    by_layer: bool = Field(False, description="fedalign: every layer has weights of its own")
    sketch: int = Field(0, ge=0, description="fedalign: columns of a sketch beyond those kept; 0: exact bases")
    freeze: float | None = Field(None, ge=0, description="by_layer: a layer that drifts more rests for the round")
    align: Literal["client", "server", "random"] = Field(
        "client", description="fedalign: who computes the score, or the control"
    )
    gamma: float = Field(1.0, ge=0, description="fedalign: sharpening exponent")
    null_correction: bool = Field(False, description="fedalign: subtract the score of unrelated data")
    cap: float | None = Field(None, gt=0, description="fedalign: nobody counts as more examples (default: no limit)")
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
        "centered_clipping, norm_clip, or a registered rule",
    )
    attackers: int = Field(0, ge=0, description="robust rules: attackers to withstand in a cohort")
    neighbours: bool = Field(False, description="nearest-neighbour mixing before the robust rule")
    clip_norm: float | None = Field(None, gt=0, description="clip every update to this norm before combining")
