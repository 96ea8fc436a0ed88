"""A federation of machines, from the server's side and from a node's: whose data is where, and the run itself.

Without data of their own, nodes simulate a deployment: everyone deals the config's data the same way and serves one
part of it. With `data`, a node's images are its own: the server learns their number, their class names and a digest,
measures on data of its own (`server-data`) or, without any, lets the nodes count on images they hold out.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedgraft.config.load import Config, validate
from fedgraft.core.errors import FedgraftError
from fedgraft.data.federated import FederatedData
from fedgraft.data.partition import make_partition
from fedgraft.data.partition.split import stratified_split
from fedgraft.data.sources import Dataset, load_dataset, open_path
from fedgraft.data.sources.class_map import check_names, odd_names, renamed
from fedgraft.deploy import limits
from fedgraft.runs.engines import Remote
from fedgraft.runs.loop import run
from fedgraft.runs.remote_data import RemoteData, data_held_elsewhere, empty_dataset
from fedgraft.runs.setup import RunSetup, setup_of
from fedgraft.runs.tracking import Progress


def config_of(text: str) -> Config:
    """The config of a run from its TOML text."""
    try:
        return validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FedgraftError(f"the run's config is not valid TOML: {error}.") from None


@dataclass(frozen=True)
class OwnData(FederatedData):
    """A node's own data: whatever its number, the client has all of it."""

    rows_known = others_known = False

    def rows(self, client: int) -> Tensor:
        """All training rows."""
        return super().rows(0)

    def test_rows(self, client: int) -> Tensor:
        """All test rows."""
        return super().test_rows(0)


def load_own(source: str, path: str) -> Dataset:
    """Somebody's own data; without a source the path's ending tells a table from a folder of class folders."""
    return load_dataset(source, path) if source else open_path(path)


def own_data(config: Config, source: str, path: str, classes: Sequence[str]) -> OwnData:
    """A node's own data under the federation's classes, with its share of validation images held out."""
    dataset = renamed(load_own(source, path), config.data.class_map)
    if classes:
        dataset = Dataset(dataset.name, dataset.train.named(classes), dataset.test.named(classes))
    labels = np.asarray(dataset.train.labels)
    train, held = stratified_split(labels, config.data.validation, config.seed)
    tests = np.asarray(dataset.test.labels)
    partition = make_partition("iid", labels[train], tests, 1, config.seed)
    return OwnData(dataset, train, held, partition)


def _path_source(config: Config) -> str:
    """The config's data source where it is one that reads a path in a format of its own."""
    return config.data.source if config.data.source in ("cifar10", "cifar100", "features") else ""


def remote_data(
    config: Config,
    facts: Mapping[int, Mapping[str, Any]],
    server_data: str = "",
    source: str = "",
    classes: Sequence[str] = (),
) -> RemoteData:
    """The server's view of nodes that bring their own data; `facts` are what they said of it.

    The classes are the server's own data's, else those given, else all that nodes have.
    """
    if server_data:
        own = load_own(source or _path_source(config), server_data)
    else:
        told = sorted({name for found in facts.values() for name in found["classes"]})
        own = empty_dataset(config, classes or told)
    try:
        check_names(own.classes)
    except FedgraftError as error:
        alone = [
            k for k in facts if set(facts[k]["classes"]) - {c for o in facts if o != k for c in facts[o]["classes"]}
        ]
        said = f" Client {alone[0]} alone tells of one of them." if len(alone) == 1 else ""
        raise FedgraftError(f"{error}{said}") from None
    if len(own.classes) < 2:
        raise FedgraftError(f"the nodes' data has the classes {list(own.classes)}; a federation needs at least two.")
    sizes = {client: int(found["examples"]) for client, found in facts.items()}
    return data_held_elsewhere(config, own, sizes, tuple(str(facts[client]["data"]) for client in sorted(facts)))


def wait_for_clients(
    config: Config,
    engine: Any,
    server_data: str = "",
    source: str = "",
    classes: Sequence[str] = (),
    secret: bytes | None = None,
) -> RunSetup:
    """Wait for nodes, then the job of a config on their data, or on the config's own where they bring none."""
    engine.gather()
    facts: dict[int, Mapping[str, Any]] = engine.registry.facts
    bring = {client for client, found in facts.items() if found["classes"]}
    if 0 < 2 * len(bring) <= len(facts):
        without = sorted(set(facts) - bring)
        raise FedgraftError(
            f"client {without[0]} has no data of its own and client {min(bring)} has; start all nodes with data."
        )
    if bring:
        engine.registry.need_images()
        if not server_data and not classes:  # else the names are not the nodes' to choose
            odd = odd_names({client: found["classes"] for client, found in facts.items()})
            engine.registry.leave_out(lambda told: next((odd[one] for one in told["classes"] if one in odd), ""))
    data = remote_data(config, facts, server_data, source, classes) if bring else None
    if secret is None:  # nothing is trained
        setup = setup_of(config, data, for_training=False)
    else:
        setup = setup_of(config, data, deployed=True, secret=secret)
    engine.classes = setup.task.data.dataset.classes if bring else ()
    return setup


def run_deployed(
    config: Config,
    folder: Path,
    engine: Any,
    server_data: str = "",
    source: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The server's part: wait for nodes, then the very run of `fedgraft run`, with clients on other machines."""

    def build(secret: bytes) -> tuple[RunSetup, Remote]:
        setup = wait_for_clients(config, engine, server_data, source, secret=secret)
        network = setup.task.network
        parameters = sum(p.numel() for p in network.parameters())
        limits.state(limits.reply_limit(parameters, network.width, network.classes))
        remote: Remote = engine
        return setup, remote

    return run(config, folder, progress, build=build)
