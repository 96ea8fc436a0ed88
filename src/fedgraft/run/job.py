"""Everything a run is made from, as objects; a config is one door that builds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.context import ClientContext
from fedgraft.client.policy import Policy
from fedgraft.config.agreement import rules_of
from fedgraft.config.build import build_algorithm, build_federation, build_network, device_named
from fedgraft.config.federate import federate
from fedgraft.config.load import merge, validate
from fedgraft.config.options import Config
from fedgraft.core.errors import FedgraftError
from fedgraft.core.progress import phase
from fedgraft.core.protocols import Examples
from fedgraft.core.rng import torch_stream
from fedgraft.core.state import Federation
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.federated import FederatedData
from fedgraft.data.pixels.transforms import STATISTICS, Transform, rule_for
from fedgraft.engines.choice import cores
from fedgraft.engines.pool import prepare_features
from fedgraft.metrics.metrics import check_metric
from fedgraft.models.network import VisionNetwork
from fedgraft.run.closed_form import check_clear
from fedgraft.run.task import Task
from fedgraft.run.trackers import require
from fedgraft.server.sample import sample


@dataclass(frozen=True)
class Job:
    """Everything a run is made from: its options, the algorithm, the task, and who takes part."""

    config: Config
    algorithm: Algorithm
    task: Task
    federation: Federation
    identity: str
    """What decides the bytes of the result; a folder belongs to one identity."""
    from_objects: bool = False
    """The parts came from Python: the folder's config.toml alone cannot build them again."""
    wrap: Callable[[Job, Any, Any], Any] | None = None
    """`wrap(job, opening, engine)` puts something between the server and its clients, such as attackers."""

    def __post_init__(self) -> None:
        """Refuse a choice of metrics that these classes do not have, and one place of several clients."""
        check_metric(self.config.select, self.task.data.dataset.classes)
        rule, clients = self.algorithm.aggregate, self.federation.clients
        if clients > 1 and not (rule.shares or rule.personal):
            raise FedgraftError(
                f"{self.algorithm.name} trains in one place, and here are {clients} clients, whose mean it would be; "
                "run `fedgraft centralized`, or set partition.clients=1 with partition.kind='iid'."
            )

    @property
    def client_names(self) -> tuple[str, ...]:
        """What the clients are called: their sites, or their numbers."""
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
    def judging_rows(self) -> Tensor:
        """Rows of the training images to measure on: the validation images, or the clients' where none are held out.

        Images of clients that nothing is made from do not choose the best model either.
        """
        data = self.task.data
        if len(data.validation_rows):
            return data.validation_rows
        if not self.federation.without or not data.rows_known:
            return data.train_rows
        theirs = torch.cat([data.rows(k) for k in self.federation.members])
        return data.train_rows[torch.isin(data.train_rows, theirs)]

    @property
    def left_out(self) -> list[str]:
        """Who is not there before the first round, as words of an identity."""
        return [f"without {k}" for k in sorted({*range(self.federation.clients)} - {*self.federation.founders})]

    @property
    def probe_size(self) -> int:
        """How many images every client must have in common, 0 for none; more than are held out are refused."""
        wanted = [int(one.options["probe"]) for one in self.algorithm.wants if one.needs_probe]
        count, held = max(wanted, default=0), len(self.task.data.validation_rows)
        if held < count:
            raise FedgraftError(
                f"the probe needs {count} validation images and there are {held}; raise data.validation or lower "
                "algorithm.probe"
            )
        return count

    @property
    def cohort(self) -> list[int]:
        """The clients of the first round."""
        return sample(self.federation, 0)

    @property
    def threads(self) -> int:
        """How many things this process may do side by side between rounds, each on one thread."""
        workers, on_cpu = self.config.workers, self.task.network.head.weight.device.type == "cpu"
        alone = workers == 1 or torch.get_num_threads() > 1 or not on_cpu
        return 1 if alone else workers or cores()

    def ready(self, examples: Examples, rows: Tensor) -> None:
        """Compute what is not kept of these rows yet, side by side on all cores; without a feature cache do nothing."""
        if isinstance(examples, CachedExamples) and self.threads > 1:
            prepare_features(examples, rows, self.threads)

    @cached_property
    def backbone_context(self) -> ClientContext:
        """The context of head initialisation: the untouched backbone's features, kept on disk for all runs."""
        task = self.task
        cached = task.at_entry(task.eval_images, task.network.depth, self._met_again())
        some = self.config.model.head_clients < 1 and task.data.rows_known
        asked = [task.data.rows(k) for k in self.head_clients] if some else [task.data.train_rows]
        self.ready(cached, torch.cat([*asked, task.data.validation_rows]))
        return replace(task.whole(cached, self.config.seed), policies=self.policies)

    @property
    def head_clients(self) -> list[int]:
        """Those whose sums make the head: all who are there from the start, or the share of them that is drawn."""
        founders, share = self.federation.founders, self.config.model.head_clients
        count = max(1, round(share * len(founders)))
        drawn = torch.randperm(len(founders), generator=torch_stream(self.config.seed, "head_clients"))[:count]
        return [founders[place] for place in sorted(drawn.tolist())]

    def _met_again(self) -> Examples | None:
        """The images where the rounds will want them, if they will meet most of them: then nothing is computed twice.

        Fewer are left alone: tokens of images that nobody asks for would only fill the disk.
        """
        task, local = self.task, self.algorithm.local
        rows = len(task.data.train_rows)
        met = self.config.rounds.total * len(self.cohort) * local.steps_for(max(1, rows // task.data.clients))
        if not task.transform.deterministic or 2 * met * local.batch_size < rows:
            return None
        return self.train_at(task.entry_for(self._first_block, self.config))

    def train_at(self, entry: int) -> Examples:
        """The training images where they enter: one table, whoever asks first for it, the head's sums or the rounds."""
        if entry not in self._tables:
            self._tables[entry] = self.task.at_entry(self.task.train_images, entry)
        return self._tables[entry]

    @cached_property
    def _tables(self) -> dict[int, Examples]:
        return {}

    @cached_property
    def scoring_context(self) -> ClientContext:
        """The context in which clients score weights for a mask: images where the rounds meet them, as they are."""
        task = self.task
        entry = 0 if self.config.data.augment else task.entry_for(self._first_block, self.config)
        images = self.train_at(entry) if entry else task.eval_images
        return replace(task.whole(images, self.config.seed), policies=self.policies)

    @property
    def _first_block(self) -> int:
        return self.algorithm.trainable.first_block(self.task.network)

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The rules that clients hold orders against: those of the config; of objects, the algorithm's."""
        return () if self.from_objects else rules_of(self.config, self.algorithm)


def _subtractable(a: Algorithm) -> bool:
    """What a client added to the common model can be seen and taken off again."""
    return not a.privacy.hidden and a.privacy.dp is None and a.aggregate.is_mean and a.server.memoryless


def job_of(config: Config, data: FederatedData | None = None) -> Job:
    """The objects that a config names; `data` where it lies elsewhere than the config says."""
    identity = config.digest
    algorithm = build_algorithm(config)
    rules_of(config, algorithm)
    config = head_only(config, algorithm)
    with phase("reading the data"):
        data = federate(config) if data is None else data
    if data.clients != config.partition.clients:  # the data says who its owners are
        config = validate(merge(config.table, {"partition": {"clients": data.clients}}))
        algorithm = build_algorithm(config)
    with phase("loading the network"):
        network = build_network(config, data.dataset).to(device_named(config.device))
    algorithm.trainable.check(network)
    if config.rounds.keep_contributions and not _subtractable(algorithm):
        raise FedgraftError(
            f"rounds.keep_contributions needs a mean of updates in the clear and a server that remembers nothing, and "
            f"{algorithm.name} as configured has not; leave it out: unlearn without --fast works for all."
        )
    require(config.track.trackers)
    task = Task(network, data, transform_for(network, config), config.model.name)
    federation = replace(build_federation(config, algorithm.lr, data.largest), run=identity, **members(config, data))
    if not federation.founders and data.others_known:
        raise FedgraftError("partition.joins leaves nobody to begin with; keep at least one client that is there.")
    return Job(config, algorithm, task, federation, identity)


def members(config: Config, data: FederatedData) -> dict[str, Any]:
    """Who takes part and when, by number, as fields of a federation."""
    p = config.partition
    joins, leaves = (
        {k: rounds[name] for name, k in numbers_of(rounds, option, data).items()}
        for rounds, option in ((p.joins, "joins"), (p.leaves, "leaves"))
    )
    if early := [k for k in joins if leaves.get(k, joins[k]) < joins[k]]:
        raise FedgraftError(f"client {data.client_names[early[0]]} leaves before it joins; see partition.joins.")
    never = numbers_of(p.without, "without", data).values()
    watching = frozenset(numbers_of(p.evaluate_only, "evaluate_only", data).values()) - {*never}
    return {"without": left_out(config, data), "evaluate_only": watching, "joins": joins, "leaves": leaves}


def left_out(config: Config, data: FederatedData) -> frozenset[int]:
    """The numbers of the clients that nothing is made from."""
    p = config.partition
    told = ((p.without, "without"), (p.evaluate_only, "evaluate_only"))
    found = frozenset(k for names, option in told for k in numbers_of(names, option, data).values())
    if len(found) >= data.clients:
        option = "without" if p.without else "evaluate_only"
        raise FedgraftError(f"partition.{option} leaves nobody; keep at least one client.")
    return found


def numbers_of(names: Iterable[str], option: str, data: FederatedData) -> dict[str, int]:
    """The numbers of clients that an option of the partition names, by name or number; a node knows only itself."""
    if not data.others_known:
        return {}
    known = {name: k for k, name in enumerate(data.client_names)} | {str(k): k for k in range(data.clients)}
    if strange := [name for name in names if name not in known]:
        raise FedgraftError(
            f"partition.{option} names {strange[0]!r}, and the clients are {', '.join(data.client_names)[:300]}."
        )
    return {name: known[name] for name in names}


def head_only(config: Config, algorithm: Algorithm) -> Config:
    """The config of an algorithm that is a head in one exchange: its way to make the head, and no round.

    A head that cannot be made from hidden sums is refused here, before anything is read.
    """
    made = algorithm.closed_form
    instead = "algorithm.name='fedncm'" if made else "model.head='ncm'"
    check_clear("cof" in (made, config.head) and algorithm.privacy.hidden, instead)
    if not made:
        return config
    if "head" in config.model.model_fields_set and config.model.head != made:
        raise FedgraftError(
            f"{algorithm.name} is the head model.head={made!r} itself, and model.head={config.model.head!r} is "
            f"another; leave it out, or set model.head={made!r}."
        )
    return validate(merge(config.table, {"model": {"head": made}, "rounds": {"total": 0}}))


def transform_for(network: VisionNetwork, config: Config, augment: Sequence[str] | None = None) -> Transform:
    """How images reach this network: by its own preprocessing where its folder names one, else cropped."""
    d, own = config.data, (network.mean, network.std)
    rule = rule_for(network, d.resize, d.grey_window)
    mean, std = STATISTICS.get(d.normalise, own)
    return Transform(rule, tuple(d.augment if augment is None else augment), tuple(mean), tuple(std))  # type: ignore[arg-type]
