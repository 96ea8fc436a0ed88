"""From a config to the objects it names: the network, the algorithm, the federation; `data` brings the data."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from fedgraft.aggregate.buffering import buffered
from fedgraft.aggregate.codecs import codec
from fedgraft.aggregate.robust import robust_aggregator
from fedgraft.aggregate.slots import by_examples, uniform
from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.config.load import Config
from fedgraft.config.options import DifferentialPrivacyTable
from fedgraft.core.capabilities import Capability
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.core.registry import ALGORITHMS, LOSSES, SCHEDULES, TRAINABLES
from fedgraft.core.state import Federation, Schedule
from fedgraft.data.sources.assemble import Dataset
from fedgraft.data.sources.features import FeatureStore
from fedgraft.edit import dense, low_rank, sparse  # noqa: F401 - each writes its kinds into TRAINABLES
from fedgraft.edit.trainable import Trainable
from fedgraft.local.optimizers import Optimizer, adamw, sgdm
from fedgraft.local.schedules import warmed
from fedgraft.local.train import LocalTraining
from fedgraft.models.backbones import load_network
from fedgraft.models.network import VisionNetwork
from fedgraft.privacy.accounting import Budget, distributed_noise_for, noise_for
from fedgraft.privacy.dp import AdaptiveClip, Mechanism, check_combination, secret_key, simulation_key
from fedgraft.privacy.protection import DifferentialPrivacy, private, record_private, secure
from fedgraft.privacy.records import RecordPrivacy

# ---- the network --------------------------------------------------------------------------------------------------


def build_network(config: Config, dataset: Dataset) -> VisionNetwork:
    """Return the pretrained backbone with a head for the classes of this data; reads weights from disk or the Hub."""
    source = source_for_data(config.model.name, dataset)
    image_size = config.data.image_size
    if config.model.head == "stored":
        network = load_network(source, None, image_size, config.model.dropout, config.seed)
        network = network.with_own_head(dataset.classes)
    else:
        network = load_network(source, len(dataset.classes), image_size, config.model.dropout, config.seed)
    network.amp = config.model.amp
    return network


def source_for_data(source: Any, dataset: Dataset) -> Any:
    """Return what `load_network` loads for this data: `source`, or "features:width=N" for features of width N.

    `source` is a network's name, or an object with an attribute `source`. Raises if images and features are mixed up.
    """
    name = str(getattr(source, "source", source))
    takes_features = name.partition(":")[0] == "features"
    if isinstance(dataset.train, FeatureStore):
        if takes_features:
            return f"features:width={dataset.train.width}"
        has, needs = "features", 'fg.model("features")'
    elif takes_features:
        has, needs = "images", "a network that takes images"
    else:
        return source
    raise FedgraftError(
        "E-CONFIG-NETWORK-DATA",
        f"the data are {has}, and the network is {name}",
        f"give {needs} with them (model.name, or the second argument of fg.run)",
        data=has,
        network=name,
    )


# ---- the federation -----------------------------------------------------------------------------------------------


def build_schedule(config: Config, lr: float) -> Schedule:
    """Return the learning rate over rounds, as the config's kind of schedule from the rate `lr`, with its warm-up."""
    schedule: Schedule = SCHEDULES.build(config.schedule.kind, config.schedule.options, lr=lr)
    if not config.schedule.warmup:
        return schedule
    return warmed(schedule, config.schedule.warmup)


def per_round(config: Config) -> int:
    """Return m = max(1, floor(C·K)), the number of clients in one round."""
    return max(1, int(config.rounds.fraction * config.partition.clients + 1e-9))


def build_federation(config: Config, lr: float, **fields: Any) -> Federation:
    """Return who takes part, how often, and the learning rate over rounds.

    `lr` is the rate that the schedule starts from. `fields` are those of `Federation` that do not follow from the
    config alone.
    """
    rounds = config.rounds
    speed = config.partition.speed
    if speed and len(speed) != config.partition.clients:
        raise FedgraftError(
            "E-CONFIG-SPEED",
            f"partition.speed has {len(speed)} numbers, and there are {config.partition.clients} clients",
            "give one number for each client",
            numbers=len(speed),
            clients=config.partition.clients,
        )
    from_config: dict[str, Any] = {
        "run": config.digest,
        "seed": config.seed,
        "clients": config.partition.clients,
        "per_round": per_round(config),
        "rounds": rounds.total,
        "schedule": build_schedule(config, lr),
        "sampling": rounds.sampling,
        "minimum_answers": rounds.minimum_answers or 1,
        "norm_bound": rounds.norm_bound,
        "norm_factor": rounds.norm_factor,
        "keeps_contributions": rounds.keep_contributions,
        "durations": speed,
    }
    return Federation(**{**from_config, **fields})


# ---- the algorithm ------------------------------------------------------------------------------------------------


def build_algorithm(config: Config) -> Algorithm:
    """Return the algorithm that the config names, under its privacy strategy.

    A part ("slot") of the algorithm that the config sets (what trains, weights, compression, robust rule, buffer)
    replaces the algorithm's own.
    """
    build = partial(
        ALGORITHMS.build,
        config.algorithm.name,
        config.algorithm.options,
        local=build_local(config),
        loss=LOSSES.build(config.loss.name, config.loss.options),
        seed=config.seed,
    )
    algorithm: Algorithm = build()
    trainable = _trainable_of_config(config, algorithm)
    if trainable is not None and algorithm.own_kind:
        # It has made other parts for its own trainable kind, so it is built again around that of the config.
        algorithm = build(trainable=trainable)
    elif trainable is not None:
        algorithm = vary(algorithm, trainable=trainable)
    algorithm = _with_head_rate(config, algorithm)
    if config.algorithm.weighting == "examples":
        algorithm = vary(algorithm, weighting=by_examples())
    elif config.algorithm.weighting == "uniform":
        algorithm = vary(algorithm, weighting=uniform())
    if config.compression.codec == "top_k":
        algorithm = vary(algorithm, compression=codec(f"top_k:{config.compression.fraction!r}"))
    elif config.compression.codec != "values":
        algorithm = vary(algorithm, compression=codec(config.compression.codec))
    algorithm = _with_buffer(config, _with_privacy(config, _with_robust_rule(config, algorithm)))
    check_enough(config, algorithm)
    return algorithm


def build_local(config: Config) -> LocalTraining:
    """Return the `LocalTraining` of the config: steps or epochs, batch size, optimizer and the other options."""
    local = config.local
    options = {}
    for name in LocalTraining.__dataclass_fields__:
        if name in type(local).model_fields and name not in ("optimizer", "head_lr"):
            options[name] = getattr(local, name)
    if local.client_steps:
        options["steps"] = max(local.client_steps)
    elif not local.epochs:
        options["steps"] = local.steps or 4
    return LocalTraining(**options, optimizer=_build_optimizer(config))


def _build_optimizer(config: Config) -> Optimizer:
    """Return the optimizer of local training, adamw or sgdm, with its options."""
    local = config.local
    if local.optimizer == "adamw":
        return adamw(weight_decay=local.weight_decay)
    return sgdm(local.momentum, local.weight_decay, local.nesterov, local.dampening, local.decoupled)


def _trainable_of_config(config: Config, algorithm: Algorithm) -> Trainable | None:
    """Return the trainable that the config asks for; None if the algorithm keeps its own."""
    table = config.trainable
    needs_body = Capability.TRAINED_BODY in algorithm.requires
    brings_own = needs_body or algorithm.client_state.private is not None or algorithm.own_kind
    if table.kind is None:
        _refuse_idle_options(config, brings_own)
    if table.kind is not None:
        return build_trainable(config, table.kind, algorithm.fixed_head)
    if not brings_own:
        return build_trainable(config, "head", algorithm.fixed_head)
    if "freeze_blocks" in table.model_fields_set:
        return build_trainable(config, algorithm.trainable.kind, algorithm.fixed_head)
    return None


def _refuse_idle_options(config: Config, brings_own: bool) -> None:
    """Raise if the config sets options of `trainable` without choosing the kind that would use them.

    `brings_own`: the algorithm has a trainable kind of its own.
    """
    used = {"kind", "match_norm"}
    if brings_own:
        used.add("freeze_blocks")
    idle = sorted(config.trainable.model_fields_set - used)
    if idle:
        raise FedgraftError(
            "E-CONFIG-IDLE-OPTION",
            f"trainable.{idle[0]} says how something trains, and no trainable.kind says what",
            "set trainable.kind too",
            option=f"trainable.{idle[0]}",
        )


def build_trainable(config: Config, kind: str, fixed_head: bool) -> Trainable:
    """Return the trainable of this kind with the options of the config.

    `fixed_head`: the algorithm keeps the head fixed, so it trains only if `trainable.head_too` says so.
    """
    table = config.trainable
    options = dict(table.model_extra or {})
    if kind == "sparse":
        options = {**table.sparse.model_dump(), **options}
    elif kind == "lora":
        options = {**table.lora.model_dump(), **options}
    trains_head = table.head_too
    if trains_head is None:
        trains_head = not fixed_head
    common = {"blocks": table.blocks, "freeze_blocks": table.freeze_blocks, "head": trains_head, "seed": config.seed}
    trainable: Trainable = TRAINABLES.build(kind, options, **common)
    return trainable


def _with_head_rate(config: Config, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with the head's rate of `local.head_lr`.

    It is stored as a factor of the body's rate; where only the head trains, it is the rate itself.
    """
    head_lr = config.local.head_lr
    if head_lr is None:
        return algorithm
    if Capability.TRAINED_BODY in algorithm.provides:
        return vary(algorithm, head_lr=head_lr / algorithm.lr)
    return vary(algorithm, lr=head_lr)


def _with_robust_rule(config: Config, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with the robust aggregation rule of the config; unchanged for the plain mean."""
    table = config.algorithm
    if table.robust == "mean" and not table.neighbours and table.clip_norm is None:
        return algorithm
    if Capability.COMMON_MODEL not in algorithm.provides:
        raise FedgraftError(
            "E-ALGORITHM-COMBINATION",
            f"{table.name} has more than one model, and algorithm.robust={table.robust!r} would replace the rule that "
            "computes them",
            "choose algorithm.robust='mean' or another algorithm",
            algorithm=table.name,
            part="aggregate",
            capability=Capability.COMMON_MODEL.name,
        )
    rule = robust_aggregator(table.robust, table.attackers, table.neighbours, table.clip_norm)
    return vary(algorithm, aggregate=rule)


def _with_buffer(config: Config, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with the config's buffered rounds; unchanged for synchronous ones."""
    rounds = config.rounds
    if rounds.kind == "synchronous":
        _refuse_idle_buffer(config)
        return algorithm
    cohort = per_round(config)
    if rounds.buffer is None or rounds.buffer > cohort:
        raise FedgraftError(
            "E-CONFIG-BUFFER",
            f"rounds.kind='buffered' needs the number of answers of a step, at most the {cohort} clients of a round, "
            f"and rounds.buffer is {rounds.buffer}",
            f"set rounds.buffer to a number from 1 to {cohort}",
            buffer=rounds.buffer,
            cohort=cohort,
        )
    if rounds.buffer < 2 and algorithm.privacy.collects_sum:
        raise FedgraftError(
            "E-CONFIG-BUFFER-SUM",
            "a secure sum needs two clients, and rounds.buffer is 1",
            "set rounds.buffer to at least 2",
        )
    return buffered(algorithm, rounds.buffer, rounds.staleness)


def _refuse_idle_buffer(config: Config) -> None:
    """Raise if the config sets options of a buffer, and rounds are synchronous."""
    for option in ("buffer", "staleness"):
        default = type(config.rounds).model_fields[option].default
        if getattr(config.rounds, option) != default:
            raise FedgraftError(
                "E-CONFIG-IDLE-OPTION",
                f"rounds.{option} is of buffered rounds, and these are synchronous",
                "set rounds.kind='buffered'",
                option=f"rounds.{option}",
            )


def check_enough(config: Config, algorithm: Algorithm) -> None:
    """Raise if rounds may end with fewer answers than a secure sum can be opened with: every sum would be aborted."""
    enough = config.rounds.enough
    if enough is None or not algorithm.privacy.collects_sum:
        return
    cohort = sum_cohort(config)
    needed = 2 * cohort // 3 + 1  # clients require so many, whatever the threshold of their shares
    options = algorithm.privacy.sum_options
    if options.threshold is not None and options.degree_among(cohort) is None:
        needed = max(options.threshold, (2 * cohort + 2) // 3)
    if enough < needed:
        raise FedgraftError(
            "E-CONFIG-ENOUGH",
            f"rounds.enough={enough} ends a round before its secure sum over {cohort} clients can be opened, for which "
            f"{needed} must stay",
            f"set rounds.enough to at least {needed}",
            enough=enough,
            needed=needed,
        )


def sum_cohort(config: Config) -> int:
    """Return how many clients a secure sum of a round begins with: the round's, or a buffer's."""
    if config.rounds.kind == "buffered" and config.rounds.buffer is not None:
        return config.rounds.buffer
    return per_round(config)


# ---- privacy ------------------------------------------------------------------------------------------------------


def _with_privacy(config: Config, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with the config's secure aggregation and differential privacy, where it asks for them.

    Without a noise multiplier, the one that the target epsilon needs is computed, which may take seconds.
    """
    privacy = config.privacy
    if privacy.aggregation == "secure":
        algorithm = secure(algorithm, privacy.limit, privacy.threshold, privacy.degree, privacy.smallest_group)
    table = privacy.dp
    if table is None:
        return algorithm
    if table.unit == "record":
        return _with_record_privacy(config, table, algorithm)
    check_private(config, algorithm)
    if table.epsilon is None and table.noise is None:
        raise FedgraftError(
            "E-CONFIG-DP-TARGET",
            "privacy.dp has neither a target epsilon nor a noise multiplier",
            "set privacy.dp.epsilon or privacy.dp.noise",
        )
    probability = per_round(config) / config.partition.clients
    noise = table.noise
    distributed = table.noise_source == "distributed"
    if noise is None:
        with phase("noise that keeps within epsilon"):
            target = float(table.epsilon or 0)
            if distributed:
                noise = distributed_noise_for(target, config.rounds.total, private_delta(config))
            else:
                noise = noise_for(target, probability, config.rounds.total, private_delta(config))
    mechanism = Mechanism(noise, probability, config.partition.clients)
    key = simulation_key(config.seed)
    if table.secret:
        key = secret_key()
    adaptive = None
    if table.adaptive:
        adaptive = AdaptiveClip(mechanism)
    dp = DifferentialPrivacy(mechanism, table.clip, adaptive, key, bool(table.secret), distributed)
    return private(algorithm, dp)


def _with_record_privacy(config: Config, table: DifferentialPrivacyTable, algorithm: Algorithm) -> Algorithm:
    """Return the algorithm whose clients clip and noise the gradient of each image."""
    _check_answers(config, algorithm)
    if table.adaptive or table.noise_source != "server":
        option = "adaptive" if table.adaptive else "noise_source"
        raise FedgraftError(
            "E-CONFIG-DP-RECORDS",
            f"privacy.dp.{option} is about noise on a sum of updates, and with unit='record' every client adds its own",
            "leave it out",
            option=option,
        )
    if config.model.dropout:
        raise _not_covered("model.dropout", "model.dropout has no gradient of each image", "set model.dropout=0")
    record = RecordPrivacy(
        config.rounds.total, table.clip, table.epsilon, table.noise, private_delta(config), table.secret
    )
    return record_private(algorithm, record)


def private_delta(config: Config) -> float:
    """Return the delta of the privacy accounting: as set, else 1e-5, or a tenth of 1 / clients if that is less."""
    privacy = config.privacy.dp
    if privacy is not None and privacy.delta is not None:
        return privacy.delta
    if privacy is not None and privacy.unit == "record":
        return 1e-5
    return min(1e-5, 0.1 / config.partition.clients)


def check_private(config: Config, algorithm: Algorithm) -> None:
    """Raise for settings that the accounting of differential privacy would not cover."""
    weighting = "uniform"
    if Capability.CLIENT_WEIGHTS in algorithm.weighting.requires:
        weighting = algorithm.weighting.name
    check_combination(weighting, config.rounds.sampling, private_delta(config), config.partition.clients)
    _check_answers(config, algorithm)
    _check_mechanism(config, algorithm)


def _check_answers(config: Config, algorithm: Algorithm) -> None:
    """Raise for what asks clients for numbers about their images that no noise covers."""
    if config.makes_head:
        raise _not_covered(
            "model.head",
            f"model.head={config.head!r} is computed from sums of the clients' data",
            "leave it out or set model.head='random'",
        )
    if config.personal.evaluate != "never":
        raise _not_covered(
            "personal.evaluate", "personal.evaluate shows numbers of single clients", "set personal.evaluate='never'"
        )
    if config.data.validation == 0:
        raise _not_covered(
            "data.validation",
            "without validation images the model would be measured on the clients' own",
            "raise data.validation",
        )
    if algorithm.trainable.scores_data:
        raise _not_covered(
            "trainable.sparse.strategy",
            "the mask is chosen by scores of the clients' data",
            "choose trainable.sparse.strategy='random' or a rule by weights",
        )
    if algorithm.closed_form:
        raise _not_covered(
            "algorithm.name",
            f"{algorithm.name} is computed from sums of the clients' data",
            "choose an algorithm that trains in rounds",
        )


def _not_covered(option: str, reason: str, hint: str) -> FedgraftError:
    """Return the error about an option whose result no noise covers."""
    return FedgraftError(
        "E-CONFIG-DP-NOT-COVERED",
        f"under differential privacy {reason}, which no noise covers",
        hint,
        option=option,
    )


def _check_mechanism(config: Config, algorithm: Algorithm) -> None:
    """Refuse a mechanism, made in Python, that is for another federation than the config's."""
    if algorithm.privacy.noise is None:
        return
    mechanism = algorithm.privacy.noise.mechanism
    clients = config.partition.clients
    probability = per_round(config) / clients
    if (mechanism.probability, mechanism.population) != (probability, clients):
        raise FedgraftError(
            "E-CONFIG-DP-FEDERATION",
            f"the noise is for {mechanism.population} clients of which {mechanism.probability:g} take part in a round, "
            f"and here are {clients} of which {probability:g} do",
            "give fg.private the same numbers",
            clients=clients,
        )


def budget(config: Config, algorithm: Algorithm, spent: int) -> Budget | None:
    """Return the privacy budget of which `spent` rounds have used their part; None without differential privacy.

    Without a target epsilon the rounds are accounted for, but the budget ends nothing.
    """
    table = config.privacy.dp
    noise = algorithm.privacy.noise
    if table is None or noise is None:
        return None
    mechanism = noise.mechanism
    target = table.epsilon or math.inf
    return Budget(
        target,
        private_delta(config),
        mechanism.probability,
        mechanism.noise,
        config.rounds.total,
        spent,
        noise.distributed,
    )
