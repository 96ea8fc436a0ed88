"""A deployed run, from the server's side and from a node's: where the data is, and the run itself.

Nodes without data of their own simulate a deployment: each partitions the config's data in the same way and serves one
part of it. With `data`, a node's images are its own: the server learns their number, their class names and a digest,
and evaluates on data of its own (`server-data`) or, without any, lets the nodes evaluate on images they hold out.
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
from fedgraft.data.sources import Dataset, load_dataset, open_path, options_of
from fedgraft.data.sources.class_map import check_names, odd_names, renamed
from fedgraft.deploy import limits
from fedgraft.runs.engines import Remote
from fedgraft.runs.loop import run
from fedgraft.runs.remote_data import RemoteData, data_held_elsewhere, empty_dataset
from fedgraft.runs.setup import RunSetup, setup_of
from fedgraft.runs.tracking import Progress

_SOURCES_WITH_FORMAT = ("cifar10", "cifar100", "features")  # sources that read a path in a format of their own


def parse_config(text: str) -> Config:
    """Return the config of a run from its TOML text."""
    try:
        return validate(tomllib.loads(text))
    except ValueError as error:
        raise FedgraftError(
            "E-DEPLOY-CONFIG-TOML",
            f"the run's config is not valid TOML: {error}",
            "submit the run with: fedgraft deploy submit",
        ) from None


# ---- data of a node --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnData(FederatedData):
    """A node's own data: its one client has all of it, whatever its number."""

    rows_known = others_known = False

    def rows(self, client: int) -> Tensor:
        """Return all training rows."""
        return super().rows(0)

    def test_rows(self, client: int) -> Tensor:
        """Return all test rows."""
        return super().test_rows(0)


def load_own(source: str, path: str, config: Config) -> Dataset:
    """Return the dataset at a path; without a source its format is detected from the path.

    The config's own options of sources (`findings`, `frames`, names of columns) hold where the format has them. Raises
    where the config names findings and the data has one class per image.
    """
    options = dict(config.data.model_extra or {})
    if source:
        known = options_of(source)
        if known is not None:
            options = {name: value for name, value in options.items() if name in known}
        dataset = load_dataset(source, path, **options)
    else:
        dataset = open_path(path, **options)
    if (dataset.train.findings is not None) != has_findings(config):
        raise FedgraftError(
            "E-DEPLOY-OTHER-LABELS",
            "the config and this data differ: one has sets of findings (data.findings), the other one class per image",
            "use a table, parquet file or saved dataset with a column for each finding",
        )
    return dataset


def has_findings(config: Config) -> bool:
    """Return whether the images of a config have sets of findings."""
    return bool((config.data.model_extra or {}).get("findings"))


def own_data(config: Config, source: str, path: str, classes: Sequence[str]) -> OwnData:
    """Return a node's own data, with labels by the federation's classes and the config's share held out for validation.

    `source` is the format of `path`, empty: detected; `classes` empty: the data's own.
    """
    dataset = renamed(load_own(source, path, config), config.data.class_map)
    classes = classes or config.data.class_names or ()
    if classes:
        dataset = Dataset(dataset.name, dataset.train.named(classes), dataset.test.named(classes))
    train_labels = np.asarray(dataset.train.labels)
    test_labels = np.asarray(dataset.test.labels)
    groups = dataset.train.groups
    train_rows, validation_rows = stratified_split(train_labels, config.data.validation, config.seed, groups)
    partition = make_partition("iid", train_labels[train_rows], test_labels, 1, config.seed)
    return OwnData(dataset, train_rows, validation_rows, partition)


# ---- the server's view of it -----------------------------------------------------------------------------------------


def remote_data(
    config: Config,
    facts: Mapping[int, Mapping[str, Any]],
    server_data: str = "",
    source: str = "",
    classes: Sequence[str] = (),
) -> RemoteData:
    """Return the server's view of nodes that bring their own data.

    Args:
        facts: by client, what its node reported: `examples`, `classes`, `data` (a digest).
        server_data: path of the server's own images; empty: it has none.
        source: the format of that path.
        classes: names of the classes where the server has no images; empty: all that nodes reported.
    """
    if server_data:
        if not source and config.data.source in _SOURCES_WITH_FORMAT:
            source = config.data.source
        dataset = load_own(source, server_data, config)
    else:
        names = classes or config.data.class_names or _reported_classes(facts)
        dataset = empty_dataset(config, names, has_findings(config))
    _check_classes(dataset.classes, facts)
    sizes = {client: int(reported["examples"]) for client, reported in facts.items()}
    digests = tuple(str(facts[client]["data"]) for client in sorted(facts))
    return data_held_elsewhere(config, dataset, sizes, digests)


def _reported_classes(facts: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return all class names that nodes reported, sorted."""
    names: set[str] = set()
    for reported in facts.values():
        names.update(reported["classes"])
    return sorted(names)


def _check_classes(classes: Sequence[str], facts: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse class names that look alike, and fewer than two classes.

    `facts` is what each client's node reported. Where one client alone has one of the two names, the error names it.
    """
    try:
        check_names(classes)
    except FedgraftError as error:
        alone = _clients_alone(error.fields.get("classes", ()), facts)
        if len(alone) != 1:
            raise
        name, client = alone[0]
        message = f"{error.message}; client {client} alone has {name!r}"
        raise FedgraftError(error.code, message, error.hint, client=client, **error.fields) from None
    if len(classes) < 2:
        raise FedgraftError(
            "E-DEPLOY-CLASSES",
            f"the nodes' data has the classes {list(classes)}",
            "start nodes whose data has at least two classes together",
            classes=list(classes),
        )


def _clients_alone(names: Sequence[str], facts: Mapping[int, Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Return each of these class names that exactly one client has, with that client."""
    alone = []
    for name in names:
        owners = [client for client, reported in facts.items() if name in reported["classes"]]
        if len(owners) == 1:
            alone.append((name, owners[0]))
    return alone


# ---- the run ---------------------------------------------------------------------------------------------------------


def wait_for_clients(
    config: Config,
    engine: Any,
    server_data: str = "",
    source: str = "",
    classes: Sequence[str] = (),
    secret: bytes | None = None,
) -> RunSetup:
    """Wait for the nodes; return the setup of a run on their data, or on the config's own if they bring none.

    Args:
        engine: the Flower engine; nodes that do not fit are left out of its registry.
        server_data, source: the server's own images and their format.
        classes: names of the classes, where they are known already.
        secret: the run's; None: nothing is trained, the setup is that of an evaluation.
    """
    engine.gather()
    facts: dict[int, Mapping[str, Any]] = engine.registry.facts
    nodes_bring_data = _nodes_bring_data(facts)
    data = None
    if nodes_bring_data:
        engine.registry.need_images()
        if not server_data and not classes:  # otherwise nodes do not determine the names
            _leave_out_misspelled_classes(engine)
        data = remote_data(config, facts, server_data, source, classes)
    if secret is None:
        setup = setup_of(config, data, for_training=False)
    else:
        setup = setup_of(config, data, deployed=True, secret=secret)
    engine.classes = ()
    if nodes_bring_data:
        engine.classes = setup.task.data.dataset.classes
    return setup


def _nodes_bring_data(facts: Mapping[int, Mapping[str, Any]]) -> bool:
    """Return whether nodes have data of their own; refuse a federation of which at most half have."""
    with_data = {client for client, reported in facts.items() if reported["classes"]}
    if 0 < 2 * len(with_data) <= len(facts):
        without_data = sorted(set(facts) - with_data)
        raise FedgraftError(
            "E-DEPLOY-MIXED-DATA",
            f"client {without_data[0]} has no data of its own and client {min(with_data)} has",
            "start all nodes with --data",
            client=without_data[0],
        )
    return bool(with_data)


def _leave_out_misspelled_classes(engine: Any) -> None:
    """Let the registry leave out nodes that alone spell a class differently, with advice."""
    advice = odd_names({client: reported["classes"] for client, reported in engine.registry.facts.items()})

    def reason(reported: Mapping[str, Any]) -> str:
        """Return the advice for a node that alone spells a class so, or ""."""
        for name in reported["classes"]:
            if name in advice:
                return advice[name]
        return ""

    engine.registry.leave_out(reason)


def run_deployed(
    config: Config,
    folder: Path,
    engine: Any,
    server_data: str = "",
    source: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Wait for nodes, then do what `fedgraft run` does, with clients on other machines; return the summary.

    `engine` is the Flower engine; `server_data` are the server's own images, `source` their format.
    """

    def build(secret: bytes) -> tuple[RunSetup, Remote]:
        """Return the setup, once the nodes are there, and the engine; state the limit for the size of responses."""
        setup = wait_for_clients(config, engine, server_data, source, secret=secret)
        network = setup.task.network
        parameters = sum(parameter.numel() for parameter in network.parameters())
        engine.limit_responses(limits.response_limit(parameters, network.width, network.classes))
        remote: Remote = engine
        return setup, remote

    return run(config, folder, progress, build=build)
