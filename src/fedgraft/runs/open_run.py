"""Opening a run: the edit space on its network, and with it everything that depends on which coordinates train.

`open_run` sends requests to the clients if the trainable kind has to (a mask is calibrated), or takes what was saved.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgraft.aggregate.similarity import svcca_of_bases
from fedgraft.aggregate.sketch import basis_of
from fedgraft.aggregate.slots import Answers
from fedgraft.client.actions import action_named
from fedgraft.client.context import ClientContext, shared_and_private
from fedgraft.core.capabilities import Capability
from fedgraft.core.device import Device, fetch, precision_of
from fedgraft.core.label_sets import mean_loss
from fedgraft.core.messages import Request, Scalar
from fedgraft.core.network_digest import digest
from fedgraft.core.protocols import Examples
from fedgraft.core.rng import torch_stream
from fedgraft.core.space import EditSpace, select
from fedgraft.data.examples import FeatureExamples
from fedgraft.data.federated import FederatedData
from fedgraft.edit.trainable import TrainableSetup, layer_ranges
from fedgraft.local.features import block_in_name, hidden, layer_names
from fedgraft.metrics.subgroups import parse_all
from fedgraft.models.network import VisionNetwork
from fedgraft.runs.engines import Engines
from fedgraft.runs.setup import RunSetup
from fedgraft.runs.tensor_cache import PartialSum, cached_tensors
from fedgraft.server.collect import ServerContext
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import expected_mask, masks_of_usual_share, valid_responses

log = logging.getLogger("fedgraft")
COUNTS = "class_counts"


@dataclass(frozen=True)
class OpenRun:
    """The edit space of a run, chosen and bound to its network, and the contexts in which clients and server work."""

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
        """Return the tensors that another machine needs to open the same edit space.

        With `with_probe` the probe images are among them, for machines that cannot make them.
        """
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
    """Choose what trains on the network of a run, and return its edit space with the contexts of clients and server.

    Args:
        engines: carry out requests to the clients, where the trainable kind asks for some (a mask is calibrated). None:
            no client is involved, so `saved` must hold what the kind needs.
        saved: the tensors of a checkpoint or of the server's message; None in a new run.
        probe: images for comparing representations, from another machine; None: made here where they are needed.

    The network may be changed in place (adapters).
    """
    task = setup.task
    config = setup.config
    network = task.network
    algorithm = setup.algorithm
    weight = network.head.weight.detach()
    bias = network.head.bias.detach()[:, None]
    head = fetch(torch.cat([weight, bias], 1)).clone()
    ask = None
    if engines is not None:
        ask = FederationAsk(setup, engines)
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
        ratio = norm_ratio(network, space, task.eval_images, setup.evaluation_rows[:256])
        rate_factor = min(config.trainable.match_norm, ratio)
        log.info("update-norm matching: the learning rate is raised %.2f times", rate_factor)
    entry = task.entry_for(space.first_block(network), config, algorithm.local.mixes)
    validation_rows = task.data.validation_rows
    private_start = None
    if private is not None:
        private_start = private.gather(network)
    if probe is None:
        probe = make_probe(setup, entry)
    else:
        probe = _placed(probe, probe_entry(setup, entry))
    origin = None
    if algorithm.download is not None:
        origin = space.gather(network)
    context = ClientContext(
        network,
        space,
        setup.train_at(entry),
        task.data.rows,
        config.seed,
        tests=task.at_entry(task.test_images, entry),
        test_rows=task.data.test_rows,
        private=private,
        private_start=private_start,
        probe=probe,
        origin=origin,
        sends_buffers=trainable.sends_buffers,
        held=lambda client: validation_rows,
        subgroups=parse_all(config.metrics_by),
        test_columns=task.data.dataset.test.columns,
        smallest_group=config.privacy.smallest_group,
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
        example_counts=example_counts_of(task.data),
        layers=layer_ranges(network, space, algorithm.weighting.options.get("layers", ())),
        aggregate=trainable.aggregate,
        rate_factor=rate_factor,
    )
    return OpenRun(trainable, context, server_context, head)


def example_counts_of(data: FederatedData) -> ExampleCounts:
    """Return a new record of the clients' numbers of images: as dealt here, or as remote clients reported them."""
    return ExampleCounts(data.sizes_by_client(), dealt=data.rows_known)


def _class_counts(
    setup: RunSetup, engines: Engines | None, saved: Mapping[str, Tensor] | None
) -> tuple[Tensor | None, Mapping[str, Tensor] | None]:
    """Return the federation's class counts, None where no client needs them, and `saved` without them.

    `saved` holds the tensors of a checkpoint or of the server's message, None in a new run: then the counts are summed
    over the clients. Under secure aggregation the server sees only their sum.
    """
    if Capability.CLASS_COUNTS not in setup.algorithm.requires:
        return None, saved
    if saved is not None:
        others = dict(saved)
        counts = others.pop(COUNTS)
        return counts, others
    assert engines is not None
    sums = engines.sums(setup.scoring_context).ask(action_named("class_counts"))
    return sums["counts"], None


class FederationAsk:
    """Sends requests to the clients on behalf of a trainable kind, and caches what is made of the answers."""

    def __init__(self, setup: RunSetup, engines: Engines) -> None:
        self.setup = setup
        self.engines = engines
        self.seed = setup.config.seed
        self.clients = setup.federation.clients
        self.examples = setup.task.data.total
        self._sums = engines.sums(setup.scoring_context)
        self._partial_sums: list[PartialSum] = []

    def sums(self, action: str, vector: Tensor, settings: Mapping[str, Scalar]) -> Mapping[str, Tensor]:
        """Return the sums of the clients' answers by name; under secure aggregation the server sees nothing else.

        Where this machine knows the clients' data, a sum in the clear is cached while it grows, so that a run that was
        stopped continues it.
        """
        partial_sum = None
        if self.setup.task.data.rows_known:  # else nobody here knows whether the clients' data is still the same
            request = json.dumps([self.setup.federation.clients, action, dict(settings)], sort_keys=True)
            partial_sum = PartialSum("edits", [*self._identity(), request], vector)
            self._partial_sums.append(partial_sum)
        return self._sums.ask(action_named(action), vector, settings, partial_sum)

    def each(
        self, action: str, vector: Tensor, settings: Mapping[str, Scalar], coordinates: int
    ) -> Mapping[int, Mapping[str, Tensor]]:
        """Send the `action` to each client and return, by client, the mask over `coordinates` that it chose itself.

        `vector` is the model and `settings` the options of the request. Masks of an unusual size are dropped.
        """
        sums = self._sums
        requests = []
        for client in sums.clients:
            requests.append(Request(sums.run, -1, client, action, "", vector, {}, dict(settings)))
        expected = expected_mask(requests, example_counts_of(self.setup.task.data), coordinates)
        responses = masks_of_usual_share(valid_responses(sums.exchange, requests, expected))
        return {response.client: response.evidence for response in responses}

    def _identity(self) -> list[str]:
        """Return the words of what depends on the clients' data: the data, the network, and who can be asked now."""
        return [*calibration_identity(self.setup), *self.engines.presence()]

    def cached(self, recipe: Sequence[str], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return what `make` computes, or what it computed before on this machine from the same network and data."""
        identity = [*self._identity(), *recipe]
        tensors = cached_tensors("edits", identity, make, lambda: not self._sums.lost)
        for partial_sum in self._partial_sums:
            partial_sum.forget()
        return tensors


def calibration_identity(setup: RunSetup) -> list[str]:
    """Return the words that a cached result of the clients' data and the whole network is stored under."""
    task = setup.task
    return [
        digest(task.network),
        *Device.of(task.network).cache_words(precision_of(task.network)),
        *task.data.identity,
        task.transform.digest,
        str(setup.config.seed),
        *setup.left_out,
        *setup.algorithm.privacy.identity_words(),  # rounded sums give other last bits
    ]


def probe_entry(setup: RunSetup, entry: int) -> int:
    """Return the block where a probe enters the network: as late as `entry`, and before every layer that is compared.

    `entry` is where the clients' images enter.
    """
    layers = setup.algorithm.weighting.options.get("layers", ())
    blocks = [block_in_name(name) for name in layer_names(setup.task.network, layers)]
    return min([entry, *blocks])


def _placed(probe: FeatureExamples, entry: int) -> FeatureExamples:
    """Return the probe of another machine's message with the block `entry` where it enters, which it came without."""
    return FeatureExamples(probe.features, probe.labels, entry)


def _probe(setup: RunSetup, entry: int, count: int, purpose: str, *place: int) -> FeatureExamples:
    """Return `count` validation images, computed up to the block where a probe enters.

    They are drawn by the run's random stream of this purpose and place. `entry` is where the clients' images enter.
    """
    rows = setup.task.data.validation_rows
    images = setup.task.at_entry(setup.task.eval_images, probe_entry(setup, entry))
    order = torch.randperm(len(rows), generator=torch_stream(setup.config.seed, purpose, *place))
    drawn = rows[order[:count]]
    return FeatureExamples(images.batch(drawn), images.labels[drawn], images.entry)


def make_probe(setup: RunSetup, entry: int) -> FeatureExamples | None:
    """Return the probe: validation images that all clients get where an algorithm compares representations; else None.

    `entry` is the block where the clients' images enter the network.
    """
    if not setup.probe_size:
        return None
    return _probe(setup, entry, setup.probe_size, "probe")


def align(setup: RunSetup, context: ClientContext, answers: Answers, entry: int) -> Tensor:
    """Return the alignment of each update with the common model, (updates, layers): SVCCA on a secret probe.

    Another probe is drawn in every round. `entry` is where the clients' images enter the network, whose weights are
    overwritten.
    """
    options = setup.algorithm.weighting.options
    probe = _probe(setup, entry, setup.available_probe(options), "secret_probe", answers.round)
    assert answers.start is not None
    context.forget_binding()

    def bases(vector: Tensor) -> list[Tensor]:
        """Return a basis of the representations of each layer under this model."""
        context.space.scatter(vector, context.network)
        representations = hidden(context.network, options["layers"], probe)
        return [basis_of(x, int(options["keep"]), int(options["sketch"])) for x in representations]

    before = bases(answers.start)
    rows = []
    for update in answers.updates:
        after = bases(answers.start + update)
        rows.append([svcca_of_bases(x, y, int(options["top"])).value for x, y in zip(after, before, strict=True)])
    scores = torch.tensor(rows, dtype=torch.float64)
    # A layer without direction is aligned with nothing; if the common model's layers have none, all updates are equal.
    if scores.isnan().all():
        return torch.ones_like(scores)
    return scores.nan_to_num(0.0)


def norm_ratio(network: VisionNetwork, space: EditSpace, examples: Examples, rows: Tensor) -> float:
    """Return the norm of the whole body's gradient over that of the space's, for one batch of these rows; at least 1.

    The network stays bound to the space.
    """
    body = select(network, lambda name: network.block_of(name) <= network.depth, buffers=False)
    norms = []
    for trained in (body, space):
        bound = trained.bind(network)
        network.eval()
        device = Device.of(network)
        logits = network(device.put(examples.batch(rows)), examples.entry)
        mean_loss(logits, device.put(examples.labels[rows])).backward()
        norms.append(float(torch.linalg.vector_norm(bound.gradient())))
    if not norms[1] > 0:
        return 1.0
    return max(1.0, norms[0] / norms[1])
