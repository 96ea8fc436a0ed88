"""From a config to the objects it names: the network, the algorithm, who takes part when; `data` brings the data."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from fedgraft.aggregate.codecs import codec
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import by_examples, uniform
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.config.load import Config
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.core.registry import ALGORITHMS, LOSSES, TRAINABLES
from fedgraft.core.state import Federation
from fedgraft.data.sources.assemble import Dataset
from fedgraft.data.sources.features import FeatureStore
from fedgraft.edit.trainable import Trainable
from fedgraft.local.optimizers import adamw, sgdm
from fedgraft.local.schedules import SCHEDULES, Schedule, warmed
from fedgraft.local.train import LocalTraining
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.privacy.accounting import Budget, noise_for
from fedgraft.privacy.dp import AdaptiveClip, Mechanism, check_combination, secret_key, simulation_key
from fedgraft.privacy.protection import DifferentialPrivacy, private, secure


def build_network(config: Config, dataset: Dataset) -> VisionNetwork:
    """The pretrained backbone with a head for the classes of this data; given features bring their width along."""
    m, classes = config.model, len(dataset.classes)
    return load_network(fitting(m.name, dataset), classes, config.data.image_size, m.dropout, config.seed)


def fitting(source: Any, dataset: Dataset) -> Any:
    """What names a network for this data: of given features their width is the data's to say, and no other will do."""
    given, name = isinstance(dataset.train, FeatureStore), str(getattr(source, "source", source))
    if given != (name.partition(":")[0] == "features"):
        has, take = ("features", 'fg.model("features")') if given else ("images", "a network that takes images")
        raise FedgraftError(f"the data are {has}: give {take} with them (model.name, or the second word of fg.run).")
    return f"features:width={dataset.train.width}" if isinstance(dataset.train, FeatureStore) else source


def device_named(name: str) -> torch.device:
    """The device of this name, if this machine has it."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise FedgraftError(f"the device {name!r} cannot be used here ({reason}); set device=cpu.") from None
    return device


def schedule(config: Config, lr: float) -> Schedule:
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
    made = SCHEDULES[s.kind](lr, **options.get(s.kind, {}))
    return warmed(made, s.warmup) if s.warmup else made


def per_round(config: Config) -> int:
    """m = max(1, floor(C·K)), the clients of one round."""
    return max(1, int(config.rounds.fraction * config.partition.clients + 1e-9))


def build_federation(config: Config, lr: float, **fields: Any) -> Federation:
    """Return who takes part and how often; `fields` are those that the config alone does not say."""
    rounds = config.rounds
    from_config: dict[str, Any] = {
        "run": config.digest,
        "seed": config.seed,
        "clients": config.partition.clients,
        "per_round": per_round(config),
        "rounds": rounds.total,
        "schedule": schedule(config, lr),
        "sampling": rounds.sampling,
        "minimum_answers": rounds.minimum_answers or 1,
        "norm_bound": rounds.norm_bound,
        "norm_factor": rounds.norm_factor,
        "keeps_contributions": rounds.keep_contributions,
    }
    return Federation(**{**from_config, **fields})


def private_delta(config: Config) -> float:
    """The delta of the account."""
    p = config.privacy.dp
    return p.delta if p is not None and p.delta is not None else min(1e-5, 0.1 / config.partition.clients)


def build_local(config: Config) -> LocalTraining:
    """How a client trains."""
    c = config.local
    if c.optimizer == "sgdm":
        optimizer = sgdm(c.momentum, c.weight_decay, c.nesterov, c.dampening, c.decoupled)
    else:
        optimizer = adamw(weight_decay=c.weight_decay)
    return LocalTraining(
        steps=None if c.epochs else c.steps or max(c.client_steps, default=4),
        client_steps=c.client_steps,
        epochs=c.epochs,
        batch_size=c.batch_size,
        lr=c.lr,
        optimizer=optimizer,
        clip=c.clip,
        momentum_correction=c.momentum_correction,
        sampling=c.sampling,
        amp=c.amp,
    )


def build_trainable(config: Config, kind: str, fixed_head: bool) -> Trainable:
    """What trains, as the config says; where the head keeps its start it does not train along unless asked."""
    c = config.trainable
    tables = {"sparse": c.sparse.model_dump(), "lora": c.lora.model_dump()}
    along = c.head_too if c.head_too is not None else not fixed_head
    given = {"blocks": c.blocks, "freeze_blocks": c.freeze_blocks, "head": along, "seed": config.seed}
    made: Trainable = TRAINABLES.build(kind, {**tables.get(kind, {}), **(c.model_extra or {})}, **given)
    return made


def build_algorithm(config: Config) -> Algorithm:
    """The algorithm of the config: a name of the registry, with the slots that were asked for."""
    a, aim = config.algorithm, config.loss
    options = {**(aim.model_extra or {}), **({"class_weights": aim.class_weights} if aim.class_weights else {})}
    loss = LOSSES.build(aim.name, options, label_smoothing=aim.label_smoothing)
    common = {"name", "weighting", "robust", "attackers", "neighbours", "clip_norm"}
    chosen = {key: getattr(a, key) for key in a.model_fields_set - common if getattr(a, key) is not None}
    build = partial(
        ALGORITHMS.build,
        a.name,
        {**chosen, **(a.model_extra or {})},
        local=build_local(config),
        loss=loss,
        seed=config.seed,
    )
    made: Algorithm = build()
    needs_body = Capability.TRAINED_BODY in made.requires
    brings_own = needs_body or made.client_state.private is not None or made.own_kind
    kind = config.trainable.kind or (made.trainable.kind if brings_own else "head")
    idle = sorted(config.trainable.model_fields_set - {"kind", "match_norm", *(["freeze_blocks"] * brings_own)})
    if idle and config.trainable.kind is None:
        raise FedgraftError(
            "E-CONFIG-IDLE-OPTION",
            f"trainable.{idle[0]} says how something trains, and no trainable.kind says what",
            "set trainable.kind too",
            option=f"trainable.{idle[0]}",
        )
    if config.trainable.kind or "freeze_blocks" in config.trainable.model_fields_set or not brings_own:
        trainable = build_trainable(config, kind, made.fixed_head)
        made = build(trainable=trainable) if made.own_kind else vary(made, trainable=trainable)
    if own := config.local.head_lr:
        trains_body = Capability.TRAINED_BODY in made.provides
        made = vary(made, head_lr=own / made.lr) if trains_body else vary(made, lr=own)
    if a.weighting != "default":
        made = vary(made, weighting=by_examples() if a.weighting == "examples" else uniform())
    name = f"top_k:{config.compression.fraction!r}" if config.compression.codec == "top_k" else config.compression.codec
    if name != "values":
        made = vary(made, compression=codec(name))
    if a.robust != "mean" or a.neighbours or a.clip_norm is not None:
        if Capability.COMMON_MODEL not in made.provides:
            raise FedgraftError(
                "E-ALGORITHM-COMBINATION",
                f"{a.name} has more than one model, and algorithm.robust={a.robust!r} would replace the rule that "
                "computes them",
                "choose algorithm.robust='mean' or another algorithm",
                algorithm=a.name,
                part="aggregate",
                capability=Capability.COMMON_MODEL.name,
            )
        made = vary(made, aggregate=robust_aggregator(a.robust, a.attackers, a.neighbours, a.clip_norm))
    return protect(config, made)


def protect(config: Config, algorithm: Algorithm) -> Algorithm:
    """The algorithm under the protection that the config asks for."""
    p = config.privacy
    if p.aggregation == "secure":
        algorithm = secure(algorithm, p.limit, p.threshold, p.degree)
    if p.dp is None:
        return algorithm
    check_private(config, algorithm)
    if p.dp.epsilon is None and p.dp.noise is None:
        raise FedgraftError("privacy.dp needs a target epsilon or a noise multiplier")
    q = per_round(config) / config.partition.clients
    with phase("noise that keeps within epsilon"):
        noise = p.dp.noise or noise_for(float(p.dp.epsilon or 0), q, config.rounds.total, private_delta(config))
    mechanism = Mechanism(noise, q, config.partition.clients)
    key = secret_key() if p.dp.secret else simulation_key(config.seed)
    adaptive = AdaptiveClip(mechanism) if p.dp.adaptive else None
    return private(algorithm, DifferentialPrivacy(mechanism, p.dp.clip, adaptive, key, bool(p.dp.secret)))


def check_private(config: Config, algorithm: Algorithm) -> None:
    """Refuse what the account of differential privacy would not cover."""
    check_combination(
        algorithm.weighting.name if Capability.CLIENT_WEIGHTS in algorithm.weighting.requires else "uniform",
        config.rounds.sampling,
        private_delta(config),
        config.partition.clients,
    )
    for wrong, sentence in (
        (
            config.head != "random",
            f"model.head={config.head!r} is made from sums of the clients' data, which no noise "
            "covers; leave it out or set model.head='random'.",
        ),
        (
            config.personal.evaluate != "never",
            "personal.evaluate shows numbers of single clients, which no noise covers; set personal.evaluate='never'.",
        ),
        (
            config.data.validation == 0,
            "without validation images the model would be measured on the clients' own, "
            "which no noise covers; raise data.validation.",
        ),
        (
            algorithm.trainable.scores_data,
            "the mask is chosen by scores of the clients' data, which no noise covers; "
            "choose trainable.sparse.strategy='random' or a rule by weights.",
        ),
        (
            bool(algorithm.closed_form),
            f"{algorithm.name} is made from sums of the clients' data, which no noise "
            "covers; choose an algorithm that trains in rounds.",
        ),
    ):
        if wrong:
            raise FedgraftError(f"under differential privacy {sentence}")
    if algorithm.privacy.noise is not None:  # made beside the config
        m, clients = algorithm.privacy.noise.mechanism, config.partition.clients
        if (m.probability, m.population) != (q := per_round(config) / clients, clients):
            raise FedgraftError(
                f"the noise is for {m.population} clients of which {m.probability:g} take part in a round, and here "
                f"are {clients} of which {q:g} do; give fg.private the same numbers."
            )


def budget(config: Config, algorithm: Algorithm, spent: int) -> Budget | None:
    """The account after so many rounds; without a target it is kept, but ends nothing."""
    p, dp = config.privacy.dp, algorithm.privacy.noise
    if p is None or dp is None:
        return None
    m = dp.mechanism
    return Budget(p.epsilon or math.inf, private_delta(config), m.probability, m.noise, config.rounds.total, spent)
