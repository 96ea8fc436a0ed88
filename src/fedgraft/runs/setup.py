"""Everything a run is made from, built once and never changed afterwards.

`RunParts` are the objects that a config names, or that a script hands over: algorithm, network, data. `RunSetup.build`
fills in what only a run knows: the keys of its noise, the defaults of a deployment, default learning rates, who takes
part when. It can be read from top to bottom, and nothing replaces a part of a `RunSetup` later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm, parts_of, vary
from fedgraft.client.context import ClientContext
from fedgraft.client.policy import Policy
from fedgraft.config.agreement import policies_of
from fedgraft.config.build import build_algorithm, build_federation, build_network
from fedgraft.config.federate import federate
from fedgraft.config.load import merge, validate
from fedgraft.config.options import Config
from fedgraft.core.bfloat16 import require_bfloat16
from fedgraft.core.capabilities import Capability
from fedgraft.core.device import Device, Devices, choose_devices
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.core.protocols import Examples
from fedgraft.core.rng import torch_stream
from fedgraft.core.state import Federation, Schedule
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.federated import FederatedData
from fedgraft.data.pixels.transforms import STATISTICS, Transform, rule_for
from fedgraft.engines.choice import cores
from fedgraft.engines.pool import prepare_features
from fedgraft.local.compiled import require_compiler
from fedgraft.local.losses import for_label_sets
from fedgraft.metrics.subgroups import parse_all, values_of
from fedgraft.metrics.sums import check_metric, check_metric_names
from fedgraft.models.folders import EXPORTED
from fedgraft.models.network import VisionNetwork
from fedgraft.privacy.dp import simulation_key
from fedgraft.privacy.protection import Private, RecordPrivate
from fedgraft.runs.closed_form import refuse_hidden_cof
from fedgraft.runs.folder import RunFolder
from fedgraft.runs.rates import head_curvature, with_default_rates
from fedgraft.runs.task import Task
from fedgraft.runs.trackers import require
from fedgraft.server.sample import sample

_HEADS_OF_CLASSES = ("ncm", "cof", "lda")
SECRET_BYTES = 32
"""Length of the secret from which the noise and the cohorts of a private run follow."""


@dataclass(frozen=True)
class RunParts:
    """The objects of a run before a run fills in its defaults."""

    config: Config
    algorithm: Algorithm
    task: Task
    identity: str
    """What decides the bytes of the result; a folder belongs to one identity."""
    from_objects: bool = False
    """The parts came from Python: the folder's config.toml alone cannot build them again."""
    schedule: Schedule | None = None
    """The user's own learning rate over rounds; None: that of the config."""

    @property
    def model(self) -> VisionNetwork:
        """The network, with a head for the data's classes."""
        return self.task.network

    @property
    def clients(self) -> FederatedData:
        """The data, divided among clients."""
        return self.task.data


@dataclass(frozen=True)
class Circumstances:
    """What a run is set up for, besides its config: deployed or here, for training or only to open the model."""

    deployed: bool = False
    """Clients are on other machines."""
    for_training: bool = True
    """Rounds will be trained, so default learning rates are measured; else the model is only opened again."""
    secret: bytes = b""
    """The run's secret; without one, private noise that must be secret is refused in training."""


@dataclass(frozen=True)
class RunSetup:
    """A run that is ready to begin: options, algorithm, task, and who takes part."""

    config: Config
    algorithm: Algorithm
    """With its privacy keys and its learning rates filled in."""
    task: Task
    federation: Federation
    identity: str
    from_objects: bool = False

    @classmethod
    def build(cls, parts: RunParts, circumstances: Circumstances | None = None) -> RunSetup:
        """Return the setup of these parts with what only a run knows: keys of noise, default rates, who takes part.

        For training, the head's curvature is measured on some images. Raises if the run cannot work.
        """
        circumstances = circumstances or Circumstances()
        config = parts.config
        task = parts.task
        _require_metrics_and_clients(parts)
        task.network.amp = config.model.amp
        if "bfloat16" in (parts.algorithm.local.amp, config.model.amp) and Device.of(task.network).is_host:
            require_bfloat16()
        if parts.algorithm.local.compile and circumstances.for_training:
            require_compiler(Device.of(task.network))
        task.network.label_sets = task.data.label_sets
        algorithm = parts.algorithm
        if task.data.label_sets:
            algorithm = vary(algorithm, loss=for_label_sets(algorithm.loss))
            _require_label_set_parts(config, algorithm)
        algorithm = _with_noise_key(algorithm, config, task.data, circumstances)
        if circumstances.for_training:
            _require_subgroups(parts.config, parts.task.data)
            with phase("measuring the curvature of the head", minor=True):
                curvature = head_curvature(task, algorithm)
            algorithm = with_default_rates(algorithm, curvature, from_random=config.head == "random")
        cohort_secret = b""
        if algorithm.privacy.noise is not None and algorithm.privacy.noise.bound_to_sum:
            cohort_secret = _derived(circumstances.secret, "cohorts")
        membership: dict[str, Any] = {}
        if not parts.from_objects:
            membership = _membership(config, task.data)
        if parts.schedule is not None:
            membership["schedule"] = parts.schedule
        federation = build_federation(
            config,
            algorithm.lr,
            run=parts.identity,
            largest=task.data.largest,
            minimum_answers=minimum_answers(config, circumstances.deployed),
            secret=cohort_secret,
            **membership,
        )
        if not federation.founders and task.data.others_known:
            raise FedgraftError(
                "E-RUN-NOBODY-BEGINS",
                "partition.joins leaves nobody to begin with",
                "keep at least one client that is there from the start",
            )
        return cls(config, algorithm, task, federation, parts.identity, parts.from_objects)

    @property
    def client_names(self) -> tuple[str, ...]:
        """Names of the clients: their sites, or their numbers."""
        return self.task.data.client_names

    @property
    def model(self) -> VisionNetwork:
        """The network, with a head for the data's classes."""
        return self.task.network

    @property
    def clients(self) -> FederatedData:
        """The data, divided."""
        return self.task.data

    @cached_property
    def evaluation_rows(self) -> Tensor:
        """Rows of the training images to measure on: the validation images, or the clients' where none are held out.

        Images of clients that do not train are not used to choose the best model either.
        """
        data = self.task.data
        if len(data.validation_rows):
            return data.validation_rows
        if not self.federation.without or not data.rows_known:
            return data.train_rows
        member_rows = torch.cat([data.rows(client) for client in self.federation.members])
        return data.train_rows[torch.isin(data.train_rows, member_rows)]

    @property
    def left_out(self) -> list[str]:
        """The clients that are absent before the first round, as words of an identity."""
        absent = set(range(self.federation.clients)) - set(self.federation.founders)
        return [f"without {client}" for client in sorted(absent)]

    @property
    def probe_size(self) -> int:
        """Number of images that every client must have in common, 0 for none; at most the validation images."""
        count = 0
        for observation in self.algorithm.wants:
            if observation.needs_probe:
                count = max(count, self.available_probe(observation.options))
        return count

    def available_probe(self, options: Mapping[str, Any]) -> int:
        """Return how many of the validation images are a probe: `options["probe"]`, or fewer down to its "fewest".

        Raise where validation has fewer than that.
        """
        wanted = int(options["probe"])
        needed = int(options.get("fewest", wanted))
        available = len(self.task.data.validation_rows)
        if available < needed:
            raise FedgraftError(
                "E-RUN-PROBE-SIZE",
                f"the probe needs {needed} validation images and there are {available}",
                "raise data.validation or lower algorithm.probe",
                needed=needed,
                available=available,
            )
        return min(wanted, available)

    @property
    def cohort(self) -> list[int]:
        """The clients of the first round."""
        return sample(self.federation, 0)

    @cached_property
    def devices(self) -> Devices:
        """The devices that this command computes on: that of the network, and for workers all that were chosen."""
        chosen = choose_devices(self.config.device)
        network_device = Device.of(self.task.network).torch_device
        if chosen.first.type == network_device.type:
            return chosen
        return Devices((network_device,))

    @property
    def threads(self) -> int:
        """Number of computations that this process may do side by side between rounds, each on one thread."""
        workers = self.config.workers
        if workers == 1 or torch.get_num_threads() > 1 or not Device.of(self.task.network).is_host:
            return 1
        return workers or cores()

    def cache_features(self, examples: Examples, rows: Tensor) -> None:
        """Compute the features of these rows that are not cached yet, in several processes, and store them.

        Does nothing where `examples` are not cached features, or this process may use one thread only.
        """
        if isinstance(examples, CachedExamples) and self.threads > 1:
            prepare_features(examples, rows, self.threads)

    @cached_property
    def backbone_context(self) -> ClientContext:
        """The context of head initialisation: the untouched backbone's features, cached on disk for all runs.

        Reading it first computes those that are not cached yet.
        """
        task = self.task
        cached = task.at_entry(task.eval_images, task.network.depth, self._reused_images())
        rows = [task.data.train_rows]
        if self.config.model.head_clients < 1 and task.data.rows_known:
            rows = [task.data.rows(client) for client in self.head_clients]
        self.cache_features(cached, torch.cat([*rows, task.data.validation_rows]))
        return replace(task.whole(cached, self.config.seed), policies=self.policies)

    @property
    def head_clients(self) -> list[int]:
        """The clients whose sums make the head: all that are there from the start, or a share drawn from them."""
        founders = self.federation.founders
        count = max(1, round(self.config.model.head_clients * len(founders)))
        drawn = torch.randperm(len(founders), generator=torch_stream(self.config.seed, "head_clients"))[:count]
        return [founders[place] for place in sorted(drawn.tolist())]

    def _reused_images(self) -> Examples | None:
        """Return the training images where the rounds enter, if the rounds will use most of them; else None.

        Then the head's features are computed from these and nothing twice; otherwise tokens of images that are never
        used would only fill the disk.
        """
        task = self.task
        local = self.algorithm.local
        rows = len(task.data.train_rows)
        rows_per_client = max(1, rows // task.data.clients)
        batches = self.config.rounds.total * len(self.cohort) * local.steps_for(rows_per_client)
        if not task.transform.deterministic or 2 * batches * local.batch_size < rows:
            return None
        mixes = self.algorithm.local.mixes
        return self.train_at(task.entry_for(self._first_block, self.config, mixes))

    def train_at(self, entry: int) -> Examples:
        """Return the training images as they enter the network at block `entry` (0: as pixels).

        The head's sums and the rounds share one table of them.
        """
        if entry not in self._tables:
            self._tables[entry] = self.task.at_entry(self.task.train_images, entry)
        return self._tables[entry]

    @cached_property
    def _tables(self) -> dict[int, Examples]:
        """The tables of `train_at` by entry."""
        return {}

    @cached_property
    def scoring_context(self) -> ClientContext:
        """The context in which clients score weights for a mask: images where the rounds enter, not augmented."""
        task = self.task
        images: Examples = task.eval_images
        if not self.config.data.augment:
            entry = task.entry_for(self._first_block, self.config)
            if entry:
                images = self.train_at(entry)
        return replace(task.whole(images, self.config.seed), policies=self.policies)

    @property
    def _first_block(self) -> int:
        """The first block of the network that trains."""
        return self.algorithm.trainable.first_block(self.task.network)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of the config that clients check requests against.

        Empty for a run from objects: then clients check what the algorithm implies.
        """
        if self.from_objects:
            return ()
        return policies_of(self.config, self.algorithm)


def parts_from_config(config: Config, data: FederatedData | None = None) -> RunParts:
    """Return the objects that a config names; reads the data and loads the network onto the config's device.

    `data` takes the place of the config's, where clients on other machines hold it.
    """
    identity = config.digest
    algorithm = build_algorithm(config)
    policies_of(config, algorithm)
    config = with_closed_form_head(config, algorithm)
    if data is None:
        with phase("reading the data"):
            data = federate(config)
    if data.clients != config.partition.clients:  # the data says who its owners are
        config = validate(merge(config.table, {"partition": {"clients": data.clients}}))
        algorithm = build_algorithm(config)
    _export_named_run(config)
    with phase("loading the network"):
        network = build_network(config, data.dataset).place(choose_devices(config.device).first)
    algorithm.trainable.check(network)
    if config.rounds.keep_contributions and not _subtractable(algorithm):
        raise FedgraftError(
            "E-RUN-CONTRIBUTIONS",
            "rounds.keep_contributions needs a mean of updates in the clear and a server rule without memory, which "
            f"{algorithm.name} as configured is not",
            "leave it out: unlearn without --fast works for all",
        )
    require(config.track.trackers)
    task = Task(network, data, transform_for(network, config), config.model.name)
    return RunParts(config, algorithm, task, identity)


def _export_named_run(config: Config) -> None:
    """Export the adapted model of the run whose folder `model.name` is, into that folder, unless it was done before."""
    folder = Path(config.model.name)
    if not (folder / "run.json").is_file() or (folder / EXPORTED).is_dir():
        return
    from fedgraft.runs.deliver import export_run  # opens that run, which needs this module

    record = RunFolder.open(folder)
    if record.status != "finished":
        raise FedgraftError(
            "E-RUN-MODEL-UNFINISHED",
            f"model.name={config.model.name!r} is the folder of a run that is {record.status}",
            f"finish it first: fedgraft resume {config.model.name}",
            path=str(folder),
        )
    export_run(folder, folder / EXPORTED)


def setup_of(
    config: Config,
    data: FederatedData | None = None,
    *,
    deployed: bool = False,
    for_training: bool = True,
    secret: bytes = b"",
) -> RunSetup:
    """Return the setup of a config, for its own data or for `data`.

    `deployed`: clients are on other machines; `for_training`: rounds will be trained, else the model is only opened
    again; `secret` is the run's, without which private noise that must be secret is refused in training.
    """
    parts = parts_from_config(config, data)
    return RunSetup.build(parts, Circumstances(deployed, for_training, secret))


def minimum_answers(config: Config, deployed: bool) -> int:
    """Return how many answers a round needs; by default one, and two if `deployed`, because one alone is no mean."""
    if config.rounds.minimum_answers:
        return config.rounds.minimum_answers
    if deployed and config.engine != "flower-sim":
        return min(2, config.partition.clients)
    return 1


def _require_metrics_and_clients(parts: RunParts) -> None:
    """Raise for a metric that these classes do not have, and for several clients where training is in one place."""
    data = parts.task.data
    check_metric(parts.config.select, data.dataset.classes, data.label_sets)
    check_metric_names(parts.config.metrics, data.label_sets)
    trains_in_one_place = not {Capability.EXCHANGE, Capability.PERSONAL_MODELS} & parts.algorithm.provides
    clients = parts.config.partition.clients
    if clients > 1 and trains_in_one_place:
        raise FedgraftError(
            "E-RUN-ONE-PLACE",
            f"{parts.algorithm.name} trains in one place, and here are {clients} clients",
            "run `fedgraft centralized`, or set partition.clients=1 with partition.kind='iid'",
        )


def _require_subgroups(config: Config, data: FederatedData) -> None:
    """Refuse `metrics_by` without metrics, of columns that the test images do not have, and of values nobody knows."""
    if not config.metrics_by:
        return
    if not config.metrics:
        raise FedgraftError(
            "E-RUN-SUBGROUP-METRICS", "metrics_by tells metrics by subgroup, and metrics names none", "set metrics too"
        )
    for groups in parse_all(config.metrics_by):
        if data.blind:
            if not groups.values:
                raise FedgraftError(
                    "E-RUN-SUBGROUP-VALUES",
                    f"the images are at the nodes, so metrics_by must say the values of {groups.column!r}",
                    f"write metrics_by=['{groups.column}=VALUE|VALUE']",
                    column=groups.column,
                )
            continue
        if not data.others_known:
            continue  # a node: it refuses the one request about a column that it does not have
        columns = data.dataset.test.columns
        if groups.column not in columns:
            raise FedgraftError(
                "E-RUN-SUBGROUP-COLUMN",
                f"metrics_by names the column {groups.column!r}, which the test images do not have",
                f"their columns are {', '.join(sorted(columns)) or 'none'}",
                column=groups.column,
            )
        values_of(groups, columns[groups.column])


def _require_label_set_parts(config: Config, algorithm: Algorithm) -> None:
    """Raise for a part or an option that needs one class per image, where the data has sets of findings."""
    obstacles = []
    for part in parts_of(algorithm):
        if Capability.ONE_CLASS in part.requires:
            obstacles.append(part.name)
    if config.head in _HEADS_OF_CLASSES:
        obstacles.append(f"model.head={config.head!r}")
    if obstacles:
        raise FedgraftError(
            "E-RUN-LABEL-SETS",
            f"{algorithm.name}: {obstacles[0]} needs one class per image, and this data has sets of findings",
            "choose another one: docs/data.md, Several findings per image",
            algorithm=algorithm.name,
            obstacles=tuple(obstacles),
        )


def _with_noise_key(
    algorithm: Algorithm, config: Config, data: FederatedData, circumstances: Circumstances
) -> Algorithm:
    """Return the algorithm with the key of its noise: from the run's secret, or from the seed for experiments."""
    dp = algorithm.privacy.noise
    record = algorithm.privacy.records
    if dp is None and record is None:
        return algorithm
    follows_secret = dp.bound_to_sum if dp is not None else bool(record and record.secret)
    if circumstances.deployed and config.privacy.dp is not None and config.engine != "flower-sim":
        if data.blind:
            raise FedgraftError(
                "E-RUN-PRIVATE-NO-DATA",
                "under differential privacy nodes send nothing but noised updates, so the server needs images of its "
                "own to measure on",
                "submit with --server-data",
            )
        follows_secret = config.privacy.dp.secret is not False  # secret unless the config says otherwise
    if follows_secret:
        if circumstances.for_training and len(circumstances.secret) != SECRET_BYTES:
            raise FedgraftError(
                "E-RUN-SECRET-MISSING",
                "the noise of this run must follow from a secret, and the run has none",
                "run it in a folder (fg.run(..., folder=...)), or set privacy.dp.secret=false for an experiment",
            )
        key = _derived(circumstances.secret, "noise")
    elif dp is not None and dp.key:
        key = dp.key
    else:
        key = simulation_key(config.seed)
    if isinstance(algorithm.privacy, RecordPrivate):
        keyed_record = algorithm.privacy.record.with_key(follows_secret, key)
        return vary(algorithm, privacy=replace(algorithm.privacy, record=keyed_record))
    assert isinstance(algorithm.privacy, Private) and dp is not None
    keyed = replace(dp, key=key, bound_to_sum=follows_secret)
    return vary(algorithm, privacy=replace(algorithm.privacy, dp=keyed))


def _derived(secret: bytes, purpose: str) -> bytes:
    """Return a key for one purpose that follows from the run's secret."""
    return hashlib.sha256(f"fedgraft {purpose}".encode() + secret).digest()


def _subtractable(algorithm: Algorithm) -> bool:
    """Return whether what a client added to the common model can be seen and taken off again."""
    in_the_clear = not algorithm.privacy.labels()
    is_mean = Capability.EACH_UPDATE not in algorithm.aggregate.requires
    return in_the_clear and is_mean and Capability.STATELESS_STEP in algorithm.provides


def _membership(config: Config, data: FederatedData) -> dict[str, Any]:
    """Return who takes part and when, by client number, as the fields `without`, `evaluate_only`, `joins`, `leaves`."""
    partition = config.partition
    joins = _rounds_by_number(partition.joins, "joins", data)
    leaves = _rounds_by_number(partition.leaves, "leaves", data)
    for client, first_round in joins.items():
        if leaves.get(client, first_round) < first_round:
            raise FedgraftError(
                "E-RUN-LEAVES-BEFORE-JOINING",
                f"client {data.client_names[client]} leaves before it joins",
                "see partition.joins and partition.leaves",
            )
    excluded = set(numbers_of(partition.without, "without", data).values())
    evaluate_only = set(numbers_of(partition.evaluate_only, "evaluate_only", data).values())
    return {
        "without": clients_left_out(config, data),
        "evaluate_only": frozenset(evaluate_only - excluded),
        "joins": joins,
        "leaves": leaves,
    }


def _rounds_by_number(rounds: dict[str, int], option: str, data: FederatedData) -> dict[int, int]:
    """Return the rounds that an option such as `joins` gives by client name, by client number instead."""
    by_number = {}
    for name, number in numbers_of(rounds, option, data).items():
        by_number[number] = rounds[name]
    return by_number


def clients_left_out(config: Config, data: FederatedData) -> frozenset[int]:
    """Return the numbers of the clients that never train: those of `without` and `evaluate_only`."""
    partition = config.partition
    excluded = set(numbers_of(partition.without, "without", data).values())
    excluded |= set(numbers_of(partition.evaluate_only, "evaluate_only", data).values())
    if len(excluded) >= data.clients:
        option = "without" if partition.without else "evaluate_only"
        raise FedgraftError(
            "E-RUN-NOBODY-LEFT", f"partition.{option} leaves nobody", "keep at least one client", option=option
        )
    return frozenset(excluded)


def numbers_of(names: Iterable[str], option: str, data: FederatedData) -> dict[str, int]:
    """Return the client numbers that an option's names stand for, by the name; a name may itself be a number.

    A node knows only itself: {}. An unknown name is an error; `option` is for that.
    """
    if not data.others_known:
        return {}
    known = {str(number): number for number in range(data.clients)}
    for number, name in enumerate(data.client_names):
        known.setdefault(name, number)
    numbers = {}
    for name in names:
        if name not in known:
            raise FedgraftError(
                "E-RUN-UNKNOWN-CLIENT",
                f"partition.{option} names {name!r}, and the clients are {', '.join(data.client_names)[:300]}",
                option=option,
                client=name,
            )
        numbers[name] = known[name]
    return numbers


def with_closed_form_head(config: Config, algorithm: Algorithm) -> Config:
    """Return the config with the head of an algorithm that is a head in one exchange (FedNCM, ...), and no rounds.

    Any other config is returned as it is. A head that cannot be made under secure aggregation is refused here, before
    anything is read.
    """
    closed_form = algorithm.closed_form
    alternative = "model.head='ncm'"
    if closed_form:
        alternative = "algorithm.name='fedncm'"
    refuse_hidden_cof("cof" in (closed_form, config.head) and algorithm.privacy.collects_sum, alternative)
    if not closed_form:
        return config
    if "head" in config.model.model_fields_set and config.model.head != closed_form:
        raise FedgraftError(
            "E-RUN-OTHER-HEAD",
            f"{algorithm.name} is the head model.head={closed_form!r} itself, and model.head={config.model.head!r} is "
            "another",
            f"leave it out, or set model.head={closed_form!r}",
        )
    return validate(merge(config.table, {"model": {"head": closed_form}, "rounds": {"total": 0}}))


def transform_for(network: VisionNetwork, config: Config, augment: Sequence[str] | None = None) -> Transform:
    """Return the transform of images for this network: resizing, augmentation in training, normalisation.

    The config's choices come first, then what the network was trained with. `augment` names training transforms; None:
    those of the config.
    """
    rule = rule_for(network, config.data.resize, config.data.grey_window, config.data.interpolation)
    mean, std = STATISTICS.get(config.data.normalise, (network.mean, network.std))
    training_transforms = tuple(config.data.augment if augment is None else augment)
    return Transform(rule, training_transforms, tuple(mean), tuple(std))  # type: ignore[arg-type]
