"""Everything a run is made from, as objects; a config is one door that builds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedgraft.algorithm import Algorithm
from fedgraft.config.build import build_algorithm, build_federation, build_network, device_named, federate
from fedgraft.config.load import merge, validate
from fedgraft.config.options import Config
from fedgraft.context import ClientContext
from fedgraft.data.feature_cache import CachedExamples
from fedgraft.data.federated import FederatedData
from fedgraft.data.images.rule import PixelRule
from fedgraft.data.images.transforms import STATISTICS, Transform
from fedgraft.engines.choice import cores
from fedgraft.engines.pool import prepare_features
from fedgraft.errors import FedgraftError
from fedgraft.models.network import VisionNetwork
from fedgraft.progress import phase
from fedgraft.protocols import Examples
from fedgraft.report.metrics import check_metric
from fedgraft.runs.task import Task
from fedgraft.runs.trackers import require
from fedgraft.server import sample
from fedgraft.state import Federation


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
        """Refuse a choice of metrics that these classes do not have."""
        check_metric(self.config.select, self.task.data.dataset.classes)

    @property
    def client_names(self) -> tuple[str, ...]:
        """What the clients are called: their sites, or their numbers."""
        return self.task.data.client_names

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
        cached = task.at_entry(task.eval_images, task.network.depth)
        self.ready(cached, torch.cat([task.data.train_rows, task.data.validation_rows]))
        return task.whole(cached, self.config.seed)

    @cached_property
    def scoring_context(self) -> ClientContext:
        """The context in which clients score weights for a mask."""
        return self.task.whole(self.task.eval_images, self.config.seed)


def job_of(config: Config, data: FederatedData | None = None) -> Job:
    """The objects that a config names; `data` where it lies elsewhere than the config says."""
    identity = config.digest
    algorithm = build_algorithm(config)
    config = head_only(config, algorithm)
    with phase("reading the data"):
        data = federate(config) if data is None else data
    if data.clients != config.partition.clients:  # the data says who its owners are
        config = validate(merge(config.table, {"partition": {"clients": data.clients}}))
        algorithm = build_algorithm(config)
    with phase("loading the network"):
        network = build_network(config, data.dataset).to(device_named(config.device))
    algorithm.trainable.check(network)
    require(config.track.trackers)
    task = Task(network, data, transform_for(network, config), config.model.name)
    federation = replace(build_federation(config, data.largest), run=identity)
    return Job(config, algorithm, task, federation, identity)


def head_only(config: Config, algorithm: Algorithm) -> Config:
    """The config of an algorithm that is a head in one exchange: its way to make the head, and no round."""
    made = algorithm.closed_form
    if not made:
        return config
    if "head" in config.model.model_fields_set and config.model.head != made:
        raise FedgraftError(
            f"{algorithm.name} is the head model.head={made!r} itself, and model.head={config.model.head!r} is "
            "another; leave one of the two out."
        )
    return validate(merge(config.table, {"model": {"head": made}, "rounds": {"total": 0}}))


def transform_for(network: VisionNetwork, config: Config, augment: Sequence[str] | None = None) -> Transform:
    """How images reach this network: by its own preprocessing where its folder names one, else cropped."""
    d, own = config.data, (network.mean, network.std)
    rule = PixelRule(network.image_size, "squash" if d.resize == "squash" else "crop")
    if d.resize == "model" and network.preprocessor is not None:
        rule = PixelRule.from_preprocessor(network.preprocessor, network.image_size)
    mean, std = STATISTICS.get(d.normalise, own)
    return Transform(rule, tuple(d.augment if augment is None else augment), tuple(mean), tuple(std))  # type: ignore[arg-type]
