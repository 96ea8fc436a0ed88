"""From a validated config to the parts that work: data, partition, network, edit space, algorithm, engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgraft import zoo
from fedgraft.algorithm import Algorithm, Mixture, Moves, Protection, vary
from fedgraft.client import Workplace
from fedgraft.combine.server_rules import plain_tail
from fedgraft.contracts import Examples
from fedgraft.data.examples import ImageExamples
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.partition import Partition, make_partition
from fedgraft.data.sources import Dataset, load_dataset
from fedgraft.data.split import stratified_split
from fedgraft.data.store import cache_dir
from fedgraft.data.transforms import STATISTICS, Transform
from fedgraft.edit.space import EditSpace, select
from fedgraft.engines.in_process import InProcess
from fedgraft.errors import FedgraftError
from fedgraft.exchange.codecs import codec
from fedgraft.experiment.config import Config
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.schedules import SCHEDULES, Schedule, warmed
from fedgraft.local.train import LocalRule
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.round import Judge
from fedgraft.server import Federation

log = logging.getLogger("fedgraft")


@dataclass(frozen=True)
class Deal:
    """The data of a run: the stores, which rows are for what, and who holds which."""

    dataset: Dataset
    train_rows: Tensor
    validation_rows: Tensor
    partition: Partition

    def rows(self, client: int) -> Tensor:
        """A client's training rows in the training store."""
        return self.train_rows[torch.from_numpy(np.asarray(self.partition.train_rows(client)))]

    def test_rows(self, client: int) -> Tensor:
        """A client's own test rows in the test store."""
        return torch.from_numpy(np.asarray(self.partition.test_rows(client)).astype(np.int64))

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.dataset.train.classes)


def deal(config: Config) -> Deal:
    """Load the data, hold out validation images once, and deal the rest to the clients."""
    d, p = config.data, config.partition
    options = {"classes": d.classes, "train": d.count, "test": max(d.classes, d.count // 5)}
    dataset = load_dataset(d.source, d.path, **(options if d.source == "synthetic" else {}))
    labels = np.asarray(dataset.train.labels)
    train, held = stratified_split(labels, d.validation, config.seed)
    if d.limit is not None and d.limit < len(train):
        _, kept = stratified_split(labels[train], d.limit / len(train), config.seed)
        train = train[kept]
    partition = make_partition(
        p.kind, labels[train], np.asarray(dataset.test.labels), p.clients, config.seed, **_partition_options(config)
    )
    return Deal(dataset, torch.from_numpy(np.asarray(train)), torch.from_numpy(np.asarray(held)), partition)


def _partition_options(config: Config) -> dict[str, object]:
    p = config.partition
    own: dict[str, dict[str, object]] = {
        "classes": {"per_client": p.classes_per_client, "allow_uncovered": p.allow_uncovered},
        "shards": {"per_client": p.shards_per_client, "per_class": p.shard_rule == "per_class"},
        "dirichlet": {"alpha": p.alpha, "min_size": p.minimum},
        "dirichlet_balanced": {"alpha": p.alpha},
        "groups": {"groups": p.groups, "allow_uncovered": p.allow_uncovered},
    }
    return {**own.get(p.kind, {}), "test": p.test}


def build_network(config: Config, classes: int) -> VisionNetwork:
    """The pretrained trunk with a head for this many classes."""
    m = config.model
    return load_network(m.name, classes, config.data.image_size, m.dropout, config.seed)


def open_space(config: Config, network: VisionNetwork) -> EditSpace:
    """The coordinates that may move. Masks and low-rank factors are opened by their own recipes."""
    moves = config.moves
    last = network.depth - moves.blocks

    def wanted(name: str) -> bool:
        block = network.block_of(name)
        head = block > network.depth
        if not head and block < moves.freeze_blocks and moves.freeze_blocks:
            return False
        return {
            "everything": True,
            "head": head,
            "body": not head,
            "last_blocks": (moves.head_too if head else block >= last),
        }[moves.kind]

    if moves.freeze_blocks > network.depth:
        raise FedgraftError(
            f"moves.freeze_blocks is {moves.freeze_blocks}, but {config.model.name} has {network.depth} blocks"
        )
    return select(network, wanted)


def schedule(config: Config) -> Schedule:
    """The learning rate over rounds."""
    s = config.schedule
    options: dict[str, dict[str, object]] = {
        "cosine": {"minimum": s.minimum, "restarts": s.restarts},
        "linear": {"minimum": s.minimum},
        "lambda": {"decay": s.decay},
        "inverse": {"gamma": s.gamma, "power": s.power},
        "step": {"at": s.at, "factor": s.factor},
        "plateau": {"factor": s.factor, "patience": s.patience, "minimum": s.minimum},
    }
    made = SCHEDULES[s.kind](config.local.lr, **options.get(s.kind, {}))
    return warmed(made, s.warmup) if s.warmup else made


def per_round(config: Config) -> int:
    """m = max(1, floor(C·K)), the clients of one round."""
    return max(1, int(config.rounds.fraction * config.partition.clients + 1e-9))


def build_federation(config: Config) -> Federation:
    """Who takes part and how often."""
    r = config.rounds
    return Federation(
        run=config.digest,
        seed=config.seed,
        clients=config.partition.clients,
        per_round=per_round(config),
        rounds=r.total,
        schedule=schedule(config),
        sampling=r.sampling,
        minimum_answers=r.minimum_answers,
        norm_bound=r.norm_bound,
    )


def build_local(config: Config) -> LocalRule:
    """How a client trains."""
    c = config.local
    if c.optimizer == "sgdm":
        optimizer = sgdm(c.momentum, c.weight_decay, c.nesterov, c.dampening, c.decoupled)
    else:
        optimizer = adamw(weight_decay=c.weight_decay)
    return LocalRule(
        amount=c.epochs or c.steps or 4,
        unit="epochs" if c.epochs else "steps",
        batch_size=c.batch_size,
        optimizer=optimizer,
        clip=c.clip,
        label_smoothing=config.model.label_smoothing,
        even_reach=c.even_reach,
        amp=c.amp,
    )


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of the config: an entry of the zoo, with the codec and the combiner that were asked for."""
    a, m = config.algorithm, config.moves
    options = a.model_dump(exclude={"name", "robust", "liars", "neighbours", "clip_norm"})
    moves = Moves(m.kind, m.blocks, m.freeze_blocks, m.head_too)
    made = zoo.named(a.name, local=build_local(config), moves=moves, seed=config.seed, **options)
    name = f"top_k:{config.sends.fraction!r}" if config.sends.codec == "top_k" else config.sends.codec
    made = vary(made, sends=codec(name), protects=Protection(config.protects.kind))
    if a.robust != "mean" or a.neighbours or a.clip_norm is not None:
        if isinstance(made.combine, Mixture):
            raise FedgraftError(f"{a.name} mixes models by similarity; the robust rule {a.robust} has no place in it.")
        made = vary(made, combine=zoo.robust_combiner(a.robust, a.liars, a.neighbours, a.clip_norm))
    return made


class Setup:
    """Everything a run needs, built once. Parts that cost something are made when first used."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.algorithm = build_algorithm(config)
        self.deal = deal(config)
        self.network = build_network(config, self.deal.classes)
        self.federation = build_federation(config)
        own = (self.network.mean, self.network.std)
        statistics: Any = STATISTICS.get(config.data.normalise, own)
        self.transform = Transform(self.network.image_size, config.data.augment, *statistics)
        self.pixels = ImageExamples(self.deal.dataset.train, self.transform)
        self.test_pixels = ImageExamples(self.deal.dataset.test, self.transform)
        self.space = open_space(config, self.network)
        if self.space.size > self.space.trained:  # batch-norm statistics take the plain mean, whatever the server rule
            self.algorithm = vary(self.algorithm, server=plain_tail(self.algorithm.server, self.space.trained))

    def at_entry(self, pixels: ImageExamples, entry: int) -> Examples:
        """These images where they enter: as pixels, or as kept outputs of the fixed part of the network."""
        return self.kept(pixels, entry) if entry else pixels

    def kept(self, pixels: ImageExamples, entry: int) -> CachedExamples:
        """Outputs of the network before `entry`, computed once for all runs on this machine."""
        return CachedExamples(pixels, self.network, entry, cache_dir() / "features", key=self.config.model.name)

    @cached_property
    def entry(self) -> int:
        """The last entry before anything that moves: what lies before it is the same for the whole run."""
        c, network = self.config, self.network
        body_finetuned = c.personal.finetune_epochs > 0 and c.personal.finetune_part != "head"
        if not c.data.cache_features or not self.transform.deterministic or body_finetuned or self.algorithm.wants:
            return 0
        return network.entry_for(self.space.first_block(network))

    @cached_property
    def examples(self) -> Examples:
        """Training (and validation) images as the network meets them in this run."""
        return self.at_entry(self.pixels, self.entry)

    @cached_property
    def tests(self) -> Examples:
        """Test images, likewise."""
        return self.at_entry(self.test_pixels, self.entry)

    @cached_property
    def place(self) -> Workplace:
        """The clients' workplace in this process."""
        private = None
        if self.algorithm.keeps.kind == "head":
            private = select(self.network, lambda name: self.network.block_of(name) > self.network.depth)
        return Workplace(
            self.network, self.space, self.examples, self.deal.rows, self.config.seed,
            self.tests, self.deal.test_rows, private,
        )  # fmt: skip

    @cached_property
    def trunk_place(self) -> Workplace:
        """The workplace of step 0: the untouched trunk's features, kept on disk and shared by all runs."""
        plain = ImageExamples(self.deal.dataset.train, replace(self.transform, train=()))
        cached = self.kept(plain, self.network.depth)
        return replace(self.place, examples=cached, _bound={}, _active="")

    @cached_property
    def judge(self) -> Judge:
        """What the server knows of the space, and can compute for itself."""
        s, n = self.space, self.network
        return Judge(s.digest, s.size, s.trained, n.width, n.classes)

    def engine(self, place: Workplace | None = None) -> InProcess:
        """An engine for this run's clients."""
        return InProcess(self.algorithm, place or self.place)


def warnings_for(config: Config, setup: Setup) -> list[str]:
    """Settings that work but do not mean what one may think."""
    found = []
    m, stats = per_round(config), setup.deal.partition.statistics()
    if m == 1 and config.partition.clients > 1:
        found.append("one client per round: every weighting rule is the same; raise rounds.fraction")
    missing = stats["uncovered"]
    if len(missing):
        found.append(f"{len(missing)} classes are held by nobody, so they cannot be learned: {list(missing)[:10]}")
    found += stats["notes"]
    if isinstance(setup.algorithm.combine, Mixture) and m < config.partition.clients:
        found.append("with partial participation only the cohort's models are mixed; the others wait")
    return found


def default_root() -> Path:
    """Where runs go unless told otherwise."""
    return Path("runs")
