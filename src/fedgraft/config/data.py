"""Tables of what is adapted to what: the images, their division among clients, the pretrained network."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from fedgraft.config.section import NOT_IN_IDENTITY, Section


class DataTable(Section):
    """Where the images come from."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    source: str = Field(
        "digits",
        description="digits, cifar10, cifar100, folder, owners (a folder per owner), parquet, npz, datasets, table (a "
        "CSV file that names images), features, synthetic, or a registered name; its own options stand beside it "
        "(image, label, site, group: column names; findings: columns of 0 and 1 where an image has several labels; "
        "frames: first, middle or all of a scan)",
    )
    path: str | None = Field(None, description="file or folder with the data; else the usual places, then the Hub")
    validation: float = Field(0.1, ge=0, lt=1, description="share of the training images held out, stratified")
    image_size: int | None = Field(
        None, ge=4, le=4096, description="pixels the network sees; default: what it was trained on"
    )
    resize: Literal["model", "crop", "squash"] = Field(
        "model", description="how images get the network's size; default: as the network was trained, else crop"
    )
    interpolation: Literal["model", "nearest", "bilinear", "bicubic", "lanczos"] = Field(
        "model", description="filter of the resizing; default: as the network was trained, else bicubic"
    )
    grey_window: tuple[float, float] | None = Field(
        None,
        description="grey values of deep images (16 bits and more) shown black and white; default: 0 and 255, of scans "
        "the window of the file",
    )
    unreadable: Literal["refuse", "skip"] | None = Field(
        None, description="images that cannot be read: refuse the data (the default), or skip them with a warning"
    )
    augment: tuple[Literal["flip", "crop", "resized_crop", "jitter", "randaugment"], ...] = Field(
        (), description="training transforms, in this order; evaluation never augments"
    )
    normalise: Literal["model", "imagenet", "cifar100"] = Field(
        "model", description="one normalisation for all splits; default: what the network was trained with"
    )
    class_map: dict[str, str] | None = Field(
        None, description="names of classes to replace, as a table or a TOML file: old = new"
    )
    class_names: tuple[str, ...] | None = Field(
        None,
        description="the classes of the run, in order; data with others is refused, and so is a server with others",
    )
    limit: int | None = Field(None, ge=1, description="use only so many training images, stratified")
    classes: int = Field(10, ge=2, description="synthetic only: number of classes")
    count: int = Field(2000, ge=10, description="synthetic only: number of training images")
    store: Literal["resized", "none"] = Field(
        "resized",
        description="resized: images are decoded once and stored at the network's size; none: they are decoded "
        "whenever they are used, and take no disk",
        json_schema_extra=NOT_IN_IDENTITY,
    )
    cache_features: bool = Field(
        True, description="cache the frozen backbone's outputs; equal within 1e-6, much faster"
    )

    @field_validator("class_map", mode="before")
    @classmethod
    def _read_map(cls, value: Any) -> Any:
        """Return the map of class names; a word is the path of a TOML file with it."""
        if not isinstance(value, str):
            return value
        try:
            return tomllib.loads(Path(value).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # not TOML, not UTF-8, an integer without end
            raise ValueError(f"the file {value} is no map of class names ({error})") from None


class PartitionTable(Section):
    """How the training images are divided among clients."""

    kind: Literal["iid", "stratified", "classes", "shards", "dirichlet", "dirichlet_balanced", "groups", "by_site"] = (
        Field("stratified", description="by_site: one client per owner, as the data's site column says")
    )
    column: str = Field("site", description="kind=by_site: the column of the data with the owner of each row")
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
    evaluate_only: tuple[str, ...] = Field(
        (), description="clients, by name or number, that test models on their own images and never train"
    )
    joins: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {}, description="clients, by name or number, that join later: the first round of each"
    )
    speed: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (),
        description="time that each client needs for a local training, for the virtual clock of a simulation: "
        "[1, 1, 1, 10] makes the last of four ten times slower (default: 1 for everyone)",
    )
    leaves: dict[str, Annotated[int, Field(ge=1)]] = Field(
        {}, description="clients, by name or number, that leave for good: the last round of each"
    )

    @model_validator(mode="after")
    def _named_groups(self) -> PartitionTable:
        """Refuse kind='groups' without groups of labels (pydantic)."""
        if self.kind == "groups" and not self.groups:
            raise ValueError("kind='groups' needs the labels of each group, for example groups=[[0,1,2],[3,4,5]]")
        return self


class ModelTable(Section):
    """The pretrained network and its head."""

    name: str = Field(
        "nano",
        description="nano, cnn, features, resnet18[:width=..,norm=group], a transformers folder, the folder of a "
        "finished run, or a Hub name",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="before the head")
    amp: Literal["float16", "bfloat16"] | None = Field(
        None,
        description="mixed precision of passes without gradients: evaluation, features, predictions; what is stored "
        "stays float32; training: local.amp",
    )
    head: Literal["ridge", "probe", "ncm", "cof", "lda", "stored", "random"] | None = Field(
        None,
        description="how the head starts: ridge (Fed3R), logistic probe, class means, FedCOF, linear discriminant, as "
        "stored with the network (a run's folder, an exported one), at random; default: ridge, under differential "
        "privacy random",
    )
    ridge: float | None = Field(
        None,
        gt=0,
        description="λ of the ridge head, relative to the mean feature energy; of lda: the share, at most 1, that the "
        "covariance is shrunk by; default: chosen on validation",
    )
    head_clients: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the clients whose sums make the head; with fewer the first round begins sooner, from a "
        "weaker head",
    )
    probe_steps: int = Field(50, ge=1, description="head=probe: full-batch steps on summed gradients")
