"""Opening a run: the edit space on its network, and with it everything that needs to know what trains.

`open_run` asks the clients where the trainable kind has to (a mask is calibrated), or takes what was saved. The result
is whole: no part of it works only later.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.aggregate.similarity import svcca_of_bases
from fedgraft.aggregate.sketch import basis_of
from fedgraft.aggregate.slots import Answers
from fedgraft.client.actions import action_named
from fedgraft.client.context import ClientContext, shared_and_private
from fedgraft.core.messages import Request, Scalar
from fedgraft.core.network_digest import digest
from fedgraft.core.protocols import Examples
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import EditSpace, select
from fedgraft.data.examples import FeatureExamples
from fedgraft.data.federated import FederatedData
from fedgraft.edit.trainable import TrainableSetup, layer_ranges
from fedgraft.local.features import block_of, hidden, layer_names
from fedgraft.models.network import VisionNetwork
from fedgraft.runs.engines import Engines
from fedgraft.runs.setup import RunSetup
from fedgraft.runs.tensor_cache import PartialSum, cached_tensors
from fedgraft.server.collect import ServerContext
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import mask, replies_to, same_share

log = logging.getLogger("fedgraft")
COUNTS = "class_counts"


@dataclass(frozen=True)
class OpenRun:
    """The edit space of a run, open on its network, and the contexts in which clients and server work."""

    trainable: TrainableSetup
    context: ClientContext
    server_context: ServerContext
    head: Tensor
    """The head the run began with, (classes, width + 1)."""

    @property
    def space(self) -> EditSpace:
        """The coordinates that clients train and share."""
        return self.context.space

    def message(self, with_probe: bool) -> dict[str, Tensor]:
        """Return what another machine needs to open the same space, and the probe where it cannot make it."""
        tensors = {"head": self.head}
        for name, tensor in self.trainable.stored.items():
            tensors[f"edit/{name}"] = tensor
        probe = self.context.probe
        if with_probe and isinstance(probe, FeatureExamples):
            tensors["probe/inputs"] = probe.features
            tensors["probe/labels"] = probe.labels
        return tensors


def open_run(
    setup: RunSetup,
    engines: Engines | None,
    saved: Mapping[str, Tensor] | None = None,
    probe: FeatureExamples | None = None,
) -> OpenRun:
    """Open the edit space of a run. Without engines nobody is asked, so `saved` must hold what the kind needs."""
    task = setup.task
    config = setup.config
    network = task.network
    algorithm = setup.algorithm
    weight = network.head.weight.detach()
    bias = network.head.bias.detach()[:, None]
    head = torch.cat([weight, bias], 1).cpu().clone()
    ask = None if engines is None else FederationAsk(setup, engines)
    counts, saved = _class_counts(setup, engines, saved)
    trainable = algorithm.trainable.open(network, ask, saved)
    if counts is not None:
        trainable = replace(trainable, stored={**trainable.stored, COUNTS: counts})
    for note in trainable.notes:
        log.info(note)
    if engines is not None:
        engines.close()  # workers of the preparations hold the network as it was before
    space, private = shared_and_private(algorithm, network, trainable.space)
    if algorithm.privacy.keeps_statistics_fixed:
        space = EditSpace(space.parts)
    rate_factor = 1.0
    if config.trainable.match_norm is not None:
        ratio = norm_ratio(network, space, task.eval_images, setup.judging_rows[:256])
        rate_factor = min(config.trainable.match_norm, ratio)
        log.info("update-norm matching: the learning rate is raised %.2f times", rate_factor)
    entry = task.entry_for(space.first_block(network), config)
    validation_rows = task.data.validation_rows
    context = ClientContext(
        network,
        space,
        setup.train_at(entry),
        task.data.rows,
        config.seed,
        tests=task.at_entry(task.test_images, entry),
        test_rows=task.data.test_rows,
        private=private,
        private_start=None if private is None else private.gather(network),
        probe=make_probe(setup, entry) if probe is None else _placed(probe, probe_entry(setup, entry)),
        origin=space.gather(network) if algorithm.download is not None else None,
        sends_buffers=trainable.sends_buffers,
        held=lambda client: validation_rows,
        class_counts=counts,
        policies=setup.policies,
    )
    server_context = ServerContext(
        space.digest,
        context.sent,
        space.trained,
        network.width,
        network.classes,
        active=trainable.active,
        origin=context.origin,
        align=lambda answers: align(setup, context, answers, entry),
        example_counts=claims_of(task.data),
        layers=layer_ranges(network, space, algorithm.weighting.options.get("layers", ())),
        aggregate=trainable.aggregate,
        rate_factor=rate_factor,
    )
    return OpenRun(trainable, context, server_context, head)


def claims_of(data: FederatedData) -> ExampleCounts:
    """What the server knows or was told of the numbers of the clients' images."""
    return ExampleCounts(data.sizes_by_client(), dealt=data.rows_known)


def _class_counts(
    setup: RunSetup, engines: Engines | None, saved: Mapping[str, Tensor] | None
) -> tuple[Tensor | None, Mapping[str, Tensor] | None]:
    """The federation's class counts, where clients need them: asked for, or as saved; and the rest of what was saved.

    Under secure aggregation only their sum is opened.
    """
    if not setup.algorithm.federation_counts:
        return None, saved
    if saved is not None:
        return saved[COUNTS], {name: tensor for name, tensor in saved.items() if name != COUNTS}
    assert engines is not None
    return engines.sums(setup.scoring_context).ask(action_named("class_counts"))["counts"], None


class FederationAsk:
    """Asks the clients of a setup on behalf of a trainable kind, and keeps what was made from their answers."""

    def __init__(self, setup: RunSetup, engines: Engines) -> None:
        self.setup = setup
        self.engines = engines
        self.seed, self.clients, self.examples = setup.config.seed, setup.federation.clients, setup.task.data.total
        self._sums = engines.sums(setup.scoring_context)
        self._begun: list[PartialSum] = []

    def sums(self, action: str, vector: Tensor, settings: Mapping[str, Scalar]) -> Mapping[str, Tensor]:
        """The clients' answers, added up by name; hidden where the run hides them."""
        begun = None
        if self.setup.task.data.rows_known:  # else nobody here knows whether the clients' data is still the same
            told = json.dumps([self.setup.federation.clients, action, dict(settings)], sort_keys=True)
            begun = PartialSum("edits", [*identity_of(self.setup), told], vector)
            self._begun.append(begun)
        return self._sums.ask(action_named(action), vector, settings, begun)

    def each(
        self, action: str, vector: Tensor, settings: Mapping[str, Scalar], coordinates: int
    ) -> Mapping[int, Mapping[str, Tensor]]:
        """The mask over so many coordinates that every client answers by itself."""
        asked = self._sums
        requests = [Request(asked.run, -1, k, action, "", vector, {}, dict(settings)) for k in asked.clients]
        expected = mask(requests, claims_of(self.setup.task.data), coordinates)
        return {r.client: r.evidence for r in same_share(replies_to(asked.exchange, requests, expected))}

    def cached(self, recipe: Sequence[str], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What this machine kept from making the same for the same network and data, else what `make` gives now."""
        found = cached_tensors("edits", [*identity_of(self.setup), *recipe], make, lambda: not self._sums.lost)
        for begun in self._begun:
            begun.forget()
        return found


def identity_of(setup: RunSetup) -> list[str]:
    """What a result of the clients' data and the whole network depends on."""
    task = setup.task
    hidden = [
        *setup.left_out,
        *setup.algorithm.privacy.identity_words(),
    ]  # rounded sums give other last bits
    return [digest(task.network), *task.data.identity, task.transform.digest, str(setup.config.seed), *hidden]


def probe_entry(setup: RunSetup, entry: int) -> int:
    """Where a probe enters: as late as the clients' images do, and before every layer that is looked at."""
    layers = setup.algorithm.weighting.options.get("layers", ())
    return min([entry, *(block_of(name) for name in layer_names(setup.task.network, layers))])


def _placed(probe: FeatureExamples, entry: int) -> FeatureExamples:
    """A probe that came without saying where it enters."""
    return FeatureExamples(probe.features, probe.labels, entry)


def _probe(setup: RunSetup, entry: int, count: int, purpose: str, *place: int) -> FeatureExamples:
    """So many validation images, drawn for this place, computed up to where they enter."""
    rows, images = (
        setup.task.data.validation_rows,
        setup.task.at_entry(setup.task.eval_images, probe_entry(setup, entry)),
    )
    picked = rows[torch.randperm(len(rows), generator=torch_stream(setup.config.seed, purpose, *place))[:count]]
    return FeatureExamples(images.batch(picked), images.labels[picked], images.entry)


def make_probe(setup: RunSetup, entry: int) -> FeatureExamples | None:
    """Validation images that every client has, row by row, where an algorithm compares representations."""
    return _probe(setup, entry, setup.probe_size, "probe") if setup.probe_size else None


def align(setup: RunSetup, context: ClientContext, answers: Answers, entry: int) -> Tensor:
    """Server-side alignment: SVCCA by layer of each submitted update, on a secret probe, another one each round."""
    a = setup.algorithm.weighting.options
    probe = _probe(setup, entry, int(a["probe"]), "secret_probe", answers.round)
    assert answers.start is not None
    context.release()

    def bases(vector: Tensor) -> list[Tensor]:
        context.space.scatter(vector, context.network)
        return [basis_of(x, int(a["keep"]), int(a["sketch"])) for x in hidden(context.network, a["layers"], probe)]

    before = bases(answers.start)
    scores = []
    for update in answers.updates:
        after = bases(answers.start + update)
        scores.append([svcca_of_bases(x, y, int(a["top"])).value for x, y in zip(after, before, strict=True)])
    found = torch.tensor(scores, dtype=torch.float64)
    # A layer without direction is aligned with nothing; where that is the common model's, nobody can be told apart.
    return torch.ones_like(found) if found.isnan().all() else found.nan_to_num(0.0)


def norm_ratio(network: VisionNetwork, space: EditSpace, examples: Examples, rows: Tensor) -> float:
    """‖dense gradient‖ over ‖gradient on the space‖ for one batch, both over the body's and the space's tensors."""
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
