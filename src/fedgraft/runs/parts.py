"""The pieces of a run that need no state: data dealt to clients, the schedule, the local rule, the algorithm."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft import zoo
from fedgraft.algorithm import Algorithm, Mixing, Trainable, Privacy, Protection, by_examples, uniform, vary
from fedgraft.protocols import Examples, Network
from fedgraft.data.sources.features import FeatureStore
from fedgraft.data.partition import Partition, make_partition
from fedgraft.data.sources import Dataset, load_dataset
from fedgraft.data.partition.split import stratified_split
from fedgraft.edit.space import EditSpace, select
from fedgraft.errors import FedgraftError
from fedgraft.privacy.accounting import Budget, noise_for
from fedgraft.update.codecs import codec
from fedgraft.privacy.dp import AdaptiveClip, Mechanism, check_combination, secret_key, simulation_key
from fedgraft.config.load import Config
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.schedules import SCHEDULES, Schedule, warmed
from fedgraft.local.train import LocalRule
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.server import Federation

log = logging.getLogger("fedgraft")


@dataclass(frozen=True)
class FederatedData:
    """The data of a run: the stores, which rows are for what, and who holds which."""

    dataset: Dataset
    train_rows: Tensor
    validation_rows: Tensor
    partition: Partition

    rows_known = True
    """This machine knows which rows each client has (a simulation); else clients bring data of their own."""
    blind = False
    """The server has no images of its own: the clients measure for it, on images they hold out."""

    @property
    def total(self) -> int:
        """Training images of all clients."""
        return len(self.train_rows)

    @property
    def largest(self) -> int:
        """Training images of the client with most."""
        return int(self.partition.sizes().max())

    @property
    def identity(self) -> list[str]:
        """What tells this data and how it is dealt from any other."""
        return [self.dataset.train.digest, self.partition.digest]

    def rows(self, client: int) -> Tensor:
        """A client's training rows in the training store."""
        return self.train_rows[torch.from_numpy(np.asarray(self.partition.train_rows(client)))]

    def test_rows(self, client: int) -> Tensor:
        """A client's own test rows in the test store."""
        return torch.from_numpy(np.asarray(self.partition.test_rows(client)).astype(np.int64))

    def histogram(self) -> np.ndarray:
        """Training images by client and class, (K, C)."""
        return self.partition.histogram(classes=self.classes)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.dataset.train.classes)


def open_data(config: Config) -> Dataset:
    """The data that a config names."""
    d = config.data
    options = {"classes": d.classes, "train": d.count, "test": max(d.classes, d.count // 5)}
    return load_dataset(d.source, d.path, **(options if d.source == "synthetic" else {}))


def federate(config: Config) -> FederatedData:
    """Load the data, hold out validation images once, and deal the rest to the clients."""
    d, p = config.data, config.partition
    dataset = open_data(config)
    labels = np.asarray(dataset.train.labels)
    strange = [label for group in p.groups for label in group if not 0 <= label < len(dataset.train.classes)]
    if strange:
        raise FedgraftError(
            f"partition.groups names the label {strange[0]}, and there are {len(dataset.train.classes)}"
        )
    train, held = stratified_split(labels, d.validation, config.seed)
    if d.limit is not None and d.limit < len(train):
        _, kept = stratified_split(labels[train], d.limit / len(train), config.seed)
        train = train[kept]
    partition = make_partition(
        p.kind, labels[train], np.asarray(dataset.test.labels), p.clients, config.seed, **partition_options(config)
    )
    return FederatedData(dataset, torch.from_numpy(np.asarray(train)), torch.from_numpy(np.asarray(held)), partition)


def partition_options(config: Config) -> dict[str, object]:
    """What `make_partition` is told about this kind of partition."""
    p = config.partition
    own: dict[str, dict[str, object]] = {
        "classes": {"per_client": p.classes_per_client, "allow_uncovered": p.allow_uncovered},
        "shards": {"per_client": p.shards_per_client, "per_class": p.shard_rule == "per_class"},
        "dirichlet": {"alpha": p.alpha, "min_size": p.minimum},
        "dirichlet_balanced": {"alpha": p.alpha},
        "groups": {"groups": p.groups, "allow_uncovered": p.allow_uncovered},
    }
    return {**own.get(p.kind, {}), "test": p.test}


def build_network(config: Config, dataset: Dataset) -> VisionNetwork:
    """The pretrained trunk with a head for the classes of this data; given features bring their width along."""
    m, classes = config.model, len(dataset.classes)
    name = f"features:width={dataset.train.width}" if isinstance(dataset.train, FeatureStore) else m.name
    return load_network(name, classes, config.data.image_size, m.dropout, config.seed)


def install(network: Network, head: Tensor) -> None:
    """Write a (classes, width+1) head into the network."""
    with torch.no_grad():
        network.head.weight.copy_(head[:, :-1])
        network.head.bias.copy_(head[:, -1])


def device_named(name: str) -> torch.device:
    """The device of this name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FedgraftError(f"the device {name!r} cannot be used here ({reason}); set device=cpu.") from None
    return device


def check_blocks(config: Config, network: VisionNetwork) -> None:
    """Refuse more blocks than the network has."""
    trainable = config.trainable
    wanted = {"freeze_blocks": trainable.freeze_blocks, "blocks": trainable.blocks if trainable.kind == "last_blocks" else 0}
    for name, count in wanted.items():
        if count > network.depth:
            raise FedgraftError(f"trainable.{name} is {count}, but {config.model.name} has {network.depth} blocks")


def open_space(config: Config, network: VisionNetwork) -> EditSpace:
    """The coordinates that may move. Masks and low-rank factors are opened by their own recipes."""
    trainable = config.trainable
    last = network.depth - trainable.blocks

    def wanted(name: str) -> bool:
        block = network.block_of(name)
        head = block > network.depth
        if not head and block < trainable.freeze_blocks and trainable.freeze_blocks:
            return False
        return {
            "everything": True,
            "head": head,
            "body": not head,
            "last_blocks": (trainable.head_too if head else block >= last),
        }[trainable.kind]

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


def build_federation(config: Config, largest: int = 1) -> Federation:
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
        largest=largest,
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
        momentum_correction=c.momentum_correction,
        amp=c.amp,
    )


def build_privacy(config: Config) -> Privacy | None:
    """The private mechanism of this run, with the noise that its target needs; wrong combinations are refused."""
    p = config.privacy.dp
    if p is None:
        return None
    uses = (
        "uniform"
        if config.algorithm.weighting == "uniform" or config.algorithm.name in {"scaffold", "feddyn"}
        else "examples"
    )
    check_combination(uses, config.rounds.sampling, private_delta(config), config.partition.clients)
    if p.epsilon is None and p.noise is None:
        raise FedgraftError("privacy.dp needs a target epsilon or a noise multiplier")
    q = per_round(config) / config.partition.clients
    noise = p.noise or noise_for(float(p.epsilon or 0), q, config.rounds.total, private_delta(config))
    mechanism = Mechanism(noise, q, config.partition.clients)
    key = secret_key() if p.secret else simulation_key(config.seed)
    return Privacy(mechanism, p.clip, AdaptiveClip(mechanism) if p.adaptive else None, key, p.secret)


def private_delta(config: Config) -> float:
    """The delta of the account."""
    p = config.privacy.dp
    return p.delta if p is not None and p.delta is not None else 0.1 / config.partition.clients


def budget(config: Config, algorithm: Algorithm, spent: int) -> Budget | None:
    """The account after so many rounds; without a target it is kept, but ends nothing."""
    p, privacy = config.privacy.dp, algorithm.privacy.dp
    if p is None or privacy is None:
        return None
    m = privacy.mechanism
    return Budget(p.epsilon or math.inf, private_delta(config), m.probability, m.noise, config.rounds.total, spent)


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of the config: an entry of the zoo, with the codec and the combiner that were asked for."""
    a, m = config.algorithm, config.trainable
    options = a.model_dump(exclude={"name", "weighting", "robust", "attackers", "neighbours", "clip_norm"})
    partial = m.kind == "sparse" and (m.sparse.per_client or m.sparse.adaptive_start is not None)
    alternate = m.kind == "lora" and m.lora.aggregate == "alternate"
    each = m.kind == "lora" and m.lora.aggregate in {"stack", "residual"}
    trainable = Trainable(m.kind, m.blocks, m.freeze_blocks, m.head_too, partial or alternate, each)
    options = {key: value for key, value in options.items() if value is not None}
    made = zoo.named(a.name, local=build_local(config), trainable=trainable, seed=config.seed, **options)
    name = f"top_k:{config.compression.fraction!r}" if config.compression.codec == "top_k" else config.compression.codec
    if a.weighting != "default":
        made = vary(made, weighting=by_examples() if a.weighting == "examples" else uniform())
    privacy = Protection(**config.privacy.model_dump(exclude={"dp"}), dp=build_privacy(config))
    made = vary(made, sends=codec(name), privacy=privacy)
    if a.robust != "mean" or a.neighbours or a.clip_norm is not None:
        if isinstance(made.aggregate, Mixing):
            raise FedgraftError(f"{a.name} mixes models by similarity; the robust rule {a.robust} has no place in it.")
        if each or (m.kind == "sparse" and m.sparse.per_client and m.sparse.fill == "count"):
            option, plain = ("trainable.lora.aggregate", "mean") if each else ("trainable.sparse.fill", "zero")
            raise FedgraftError(
                f"{option} decides here how changes are combined, and the robust rule {a.robust} would be ignored; "
                f"choose algorithm.robust='mean' or {option}={plain!r}."
            )
        made = vary(made, aggregate=zoo.robust_aggregator(a.robust, a.attackers, a.neighbours, a.clip_norm))
    return made


def norm_ratio(network: VisionNetwork, space: EditSpace, examples: Examples, rows: Tensor) -> float:
    """‖dense gradient‖ over ‖gradient on the space‖ for one batch, both over the trunk's and the space's tensors."""
    whole = select(network, lambda name: network.block_of(name) <= network.depth, buffers=False)
    norms = []
    for one in (whole, space):
        bound = one.bind(network)
        network.eval()
        device = next(network.parameters()).device
        logits = network(examples.batch(rows).to(device), examples.entry)
        cross_entropy(logits, examples.labels[rows].to(device)).backward()
        norms.append(float(torch.linalg.vector_norm(bound.gradient())))
    return max(1.0, norms[0] / norms[1]) if norms[1] > 0 else 1.0
