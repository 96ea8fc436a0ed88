"""Head initialisation: a head for the pretrained backbone, from sums over clients: no image and no feature moves.

`ridge` solves the normal equations of the summed statistics; `probe` minimises the summed logistic loss by L-BFGS.
Both are exactly what the pooled data would give. The regularisation and the scale of a ridge head are chosen on the
server's validation images.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedgraft.client.actions import action_named
from fedgraft.core.capabilities import Capability
from fedgraft.core.device import Device, evaluation_precision, fetch, inputs_on, precision_of
from fedgraft.core.errors import FedgraftError
from fedgraft.core.label_sets import are_label_sets, exact_matches, mean_loss
from fedgraft.core.messages import Request, Response
from fedgraft.core.network_digest import digest
from fedgraft.core.progress import phase
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.space import EditSpace
from fedgraft.edit.trainable import is_head
from fedgraft.local.forward_memory import images_at_once
from fedgraft.metrics.evaluate import Evaluation
from fedgraft.metrics.scores import predicted_classes
from fedgraft.runs.closed_form import client_class_sums, cof_heads, lda_heads, ncm_head
from fedgraft.runs.engines import Engines
from fedgraft.runs.open_run import example_counts_of
from fedgraft.runs.setup import RunSetup
from fedgraft.runs.tensor_cache import cached_tensors
from fedgraft.server.collect import Engine
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import count_weights, expected_counts, valid_responses
from fedgraft.server.secure_sum import Sums

log = logging.getLogger("fedgraft")

GRID = tuple(10.0**e for e in (-5, -4, -3, -2.5, -2, -1.5, -1, -0.5, 0))


class HeadScorer(Protocol):
    """Measures heads on validation images; `count` is how many it measured on."""

    count: int

    def __call__(self, heads: Sequence[Tensor]) -> list[tuple[float, float]]:
        """Return (accuracy, loss) of each head."""
        ...


@dataclass(frozen=True)
class InitialModel:
    """How the model that the run begins with does on validation images."""

    accuracy: float
    loss: float
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that its head cost, counted as those of rounds are."""
    scorer: HeadScorer | None = field(default=None, repr=False, compare=False)
    """What measured it."""


def install(network: Network, head: Tensor) -> None:
    """Write a head (classes, width + 1), whose last column is the bias, into the network, in place."""
    with torch.no_grad():
        network.head.weight.copy_(head[:, :-1])
        network.head.bias.copy_(head[:, -1])


def ridge_head(sums: Sums, penalty: float | None, scorer: HeadScorer) -> tuple[Tensor, float]:
    """Request the sum of the clients' statistics and return the ridge head (classes, width + 1) and its penalty.

    `penalty` None: the largest of `GRID` whose accuracy is within one standard error of the best. The scorer measures
    heads on validation images; where clients hold them it asks the clients.
    """
    statistics = sums.ask(action_named("statistics"))
    penalties = GRID if penalty is None else (penalty,)
    if "absent" in statistics:
        grams = known_grams(sums, statistics)
        return least_loss([(solve_findings(grams, statistics, value), value) for value in penalties], scorer)
    heads = [(solve(statistics["gram"], statistics["cross"], value), value) for value in penalties]
    return strongest_penalty(heads, scorer)


def known_grams(sums: Sums, statistics: Mapping[str, Tensor]) -> Tensor:
    """Return ZᵀZ over the images whose label is known, for each finding, (classes, width + 1, width + 1).

    Where some images do not say a finding, the clients are asked for their sum; else nothing more is asked.
    """
    gram = statistics["gram"]
    known = statistics["cross"][-1] + statistics["absent"][-1]  # images by finding
    unknown = (gram[-1, -1] - known).round()
    grams = gram.expand(len(known), *gram.shape).clone()
    findings = [finding for finding, count in enumerate(unknown.tolist()) if count]
    if not findings:
        return grams
    names = ",".join(map(str, findings))
    silent = sums.ask(action_named("unknown_statistics"), settings={"findings": names})["gram"]
    if not torch.allclose(silent[:, -1, -1], unknown[findings], rtol=0, atol=0.5):
        log.warning("ridge head: a client was lost between two sums, so an unknown finding counts as half present")
        return grams
    grams[findings] -= silent
    return grams


def solve_findings(grams: Tensor, statistics: Mapping[str, Tensor], penalty: float) -> Tensor:
    """Return the ridge head of sets of findings, (classes, width + 1): each finding's from the images that say it.

    Targets are ±1/2. `grams` are those of `known_grams`; λ is `penalty` times the mean feature energy of these images,
    and the bias is not penalised. A finding that no image says has zeros.
    """
    difference = (statistics["cross"] - statistics["absent"]) / 2  # (width + 1, classes)
    rows = []
    for finding, gram in enumerate(grams):
        width = len(gram) - 1
        if not float(gram[-1, -1]):
            rows.append(torch.zeros(width + 1, dtype=gram.dtype))
            continue
        damping = torch.eye(width + 1, dtype=gram.dtype) * penalty * gram.diagonal()[:width].mean()
        damping[-1, -1] = 0
        rows.append(torch.linalg.solve(gram + damping, difference[:, finding]))
    return torch.stack(rows)


def least_loss(heads: Sequence[tuple[Tensor, float]], scorer: HeadScorer) -> tuple[Tensor, float]:
    """Return the (head, penalty) of the largest penalty whose loss at its best scale is within half a nat of the least.

    It is for label sets: where findings are rare, a head that never says any is right about most images.
    """
    scales = torch.logspace(0, 2.5, 6, dtype=torch.float64).tolist()
    scaled = [head * scale for head, _ in heads for scale in scales]
    losses = torch.tensor([loss for _, loss in scorer(scaled)], dtype=torch.float64)
    by_head = losses.view(len(heads), len(scales)).min(1).values
    limit = float(by_head.min()) + 0.5 / scorer.count
    good_enough = []
    for head_and_penalty, loss in zip(heads, by_head.tolist(), strict=True):
        if loss <= limit:
            good_enough.append(head_and_penalty)
    return _largest_penalty(good_enough)


def _largest_penalty(heads: Sequence[tuple[Tensor, float]]) -> tuple[Tensor, float]:
    """Return the (head, penalty) with the largest penalty."""
    return max(heads, key=lambda head_and_penalty: head_and_penalty[1])


def strongest_penalty(heads: Sequence[tuple[Tensor, float]], scorer: HeadScorer) -> tuple[Tensor, float]:
    """Return the (head, penalty) of the largest penalty whose accuracy lies within one standard error of the best.

    A head that is hardly penalised scores as well here but has huge weights along directions of little variance, and a
    body trained through it would be thrown about.
    """
    accuracies = [accuracy for accuracy, _ in scorer([head for head, _ in heads])]
    best = max(accuracies)
    standard_error = (best * (1 - best) / scorer.count) ** 0.5
    good_enough = []
    for head_and_penalty, accuracy in zip(heads, accuracies, strict=True):
        if accuracy >= best - standard_error:
            good_enough.append(head_and_penalty)
    return _largest_penalty(good_enough)


def solve(gram: Tensor, cross: Tensor, penalty: float) -> Tensor:
    """Return the ridge head (ZᵀZ + λI)⁻¹ ZᵀY on centred targets, (classes, width + 1).

    `gram` is ZᵀZ, `cross` ZᵀY; λ is `penalty` times the mean feature energy, and the bias is not penalised.
    """
    width = len(gram) - 1
    energy = gram.diagonal()[:width].mean()
    damping = torch.eye(width + 1, dtype=gram.dtype) * penalty * energy
    damping[width, width] = 0
    targets = cross.clone()
    targets -= gram[:, -1:] / cross.shape[1]  # labels become ±: one-hot minus 1/C, so that unseen classes stay at rest
    return torch.linalg.solve(gram + damping, targets).T


def probe_head(sums: Sums, steps: int, decay: float = 1e-3, damping: float = 1e-4) -> Tensor:
    """Return a head by logistic regression with L-BFGS; every evaluation requests one sum of losses and gradients.

    `steps` is the most iterations, `decay` the L2 penalty on whitened features, `damping` is added to their covariance.
    It is fitted on whitened features (mean and covariance come from the summed statistics), where all directions have
    the same scale: a few dozen evaluations then do what thousands would do on raw features. The result is mapped back.
    """
    from scipy.optimize import minimize

    statistics = sums.ask(action_named("statistics"))
    gram = statistics["gram"]
    classes = statistics["cross"].shape[1]
    total = float(gram[-1, -1])
    mean = gram[:-1, -1] / total  # (d,)
    covariance = gram[:-1, :-1] / total - torch.outer(mean, mean)
    covariance += damping * covariance.diagonal().mean() * torch.eye(len(mean), dtype=gram.dtype)
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance))  # (d, d): whitening @ (z - mean) is white

    def to_raw_features(flat: np.ndarray) -> Tensor:
        """Return the head on raw features of a head on whitened ones."""
        white = torch.from_numpy(flat.reshape(classes, -1))
        weight = white[:, :-1] @ whitening
        bias = white[:, -1] - weight @ mean
        return torch.cat([weight, bias[:, None]], 1)

    # Clients give each secure sum once, and a line search may ask for the same point again.
    known_points: dict[bytes, Mapping[str, Tensor]] = {}

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the regularised loss at a head on whitened features, and its gradient."""
        head = to_raw_features(flat)
        key = head.numpy().tobytes()
        if key not in known_points:
            known_points[key] = sums.ask(action_named("head_gradient"), head=head)
        answer = known_points[key]
        count = float(answer["count"])
        gradient = answer["gradient"] / count
        centred = gradient[:, :-1] - torch.outer(gradient[:, -1], mean)
        white_gradient = torch.cat([centred @ whitening.T, gradient[:, -1:]], 1).numpy().ravel()
        loss = float(answer["loss"]) / count + 0.5 * decay * float((flat**2).sum())
        return loss, white_gradient + decay * flat

    start = np.zeros(classes * (len(mean) + 1))
    limits = {"maxiter": steps, "ftol": 1e-12, "gtol": 1e-8}
    with phase("head initialisation: logistic regression", steps, "steps") as progress:
        best = minimize(
            objective, start, jac=True, method="L-BFGS-B", options=limits, callback=lambda _: progress.advance()
        )
    return to_raw_features(best.x)


class LocalScorer:
    """Measures heads on features that the server has."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        ones = torch.ones(len(features), 1, dtype=torch.float64)
        self.features = torch.cat([features.double(), ones], 1)  # (n, width + 1)
        self.labels = labels
        self.count = len(labels)

    def __call__(self, heads: Sequence[Tensor]) -> list[tuple[float, float]]:
        """Return (accuracy, loss) of each head."""
        measured = []
        for head in heads:
            logits = self.features @ head.T
            if are_label_sets(self.labels):
                right = exact_matches(logits, self.labels)
            else:
                right = predicted_classes(logits) == self.labels
            accuracy = float(right.double().mean())
            loss = float(mean_loss(logits, self.labels))
            measured.append((accuracy, loss))
        return measured


class HiddenScorer:
    """Measures heads on images that the clients hold out, by secure sums of rounded counts."""

    def __init__(self, sums: Sums) -> None:
        self.sums = sums
        self.count = 1
        self.measured: dict[bytes, list[tuple[float, float]]] = {}
        """Results by heads: clients answer each question once."""

    def __call__(self, heads: Sequence[Tensor]) -> list[tuple[float, float]]:
        """Return (accuracy, loss) of each head over the images of all clients."""
        stacked = torch.stack(list(heads)).double()
        key = stacked.numpy().tobytes()
        if key not in self.measured:
            sums = self.sums.ask(action_named("head_counts"), settings={"models": len(heads)}, heads=stacked)
            evaluations = mean_counts(sums["counts"], "validation")
            self.count = max(1, evaluations[0].count)
            self.measured[key] = [(evaluation.accuracy, evaluation.loss) for evaluation in evaluations]
        return self.measured[key]


class RemoteScorer:
    """Measures heads on images that the clients hold out; only counts and sums of losses come back."""

    def __init__(self, engine: Engine, run: str, clients: Sequence[int], example_counts: ExampleCounts) -> None:
        self.engine = engine
        self.run = run
        self.clients = clients
        self.example_counts = example_counts
        self.count = 1

    def __call__(self, heads: Sequence[Tensor]) -> list[tuple[float, float]]:
        """Return (accuracy, loss) of each head over the images of all clients."""
        models = {"heads": torch.stack(list(heads)).double()}
        requests = [Request(self.run, -1, client, "count", auxiliary=models) for client in self.clients]
        expected = expected_counts(requests, len(heads), self.example_counts, "validation")
        responses = valid_responses(self.engine.exchange, requests, expected)
        evaluations = sum_counts(responses, self.example_counts, "validation")
        self.count = max(1, evaluations[0].count)
        return [(evaluation.accuracy, evaluation.loss) for evaluation in evaluations]


def no_images_error(split: str) -> FedgraftError:
    """Return the error for a split of which no client holds an image."""
    return FedgraftError(
        "E-RUN-NO-IMAGES",
        f"no client has {split} images to measure the model on",
        "raise data.validation",
        split=split,
    )


def sum_counts(responses: Sequence[Response], example_counts: ExampleCounts, split: str) -> list[Evaluation]:
    """Return the evaluation of each model from the clients' counts, added up.

    A client's counts (models, 4) are: right, right among the first five, sum of losses, images; one that claims far
    more images than others counts less. `split` names the images.
    """
    weights = count_weights(responses, example_counts, split)
    total = torch.zeros(1, 4).double()
    for response in responses:
        total = total + response.sums["counts"] * weights[response.client]
    return mean_counts(total, split)


def mean_counts(total: Tensor, split: str) -> list[Evaluation]:
    """Return the evaluation of each model from counts (models, 4) over all clients; `split` names the images."""
    if not total[0, 3]:
        raise no_images_error(split)
    evaluations = []
    for right, near, loss, images in total:
        evaluations.append(Evaluation(float(loss / images), float(right / images), float(near / images), int(images)))
    return evaluations


def calibrate_temperature(head: Tensor, scorer: HeadScorer) -> Tensor:
    """Return the head times the scale with the least loss by the scorer: least squares gives directions, not log-odds.
    It is the smallest scale within one standard error of the best: half a nat in the likelihood of all images (Wilks
    1938). Few images that are all right would like an endless scale: a head sure of everything, without a gradient.
    """
    scales = torch.logspace(0, 2.5, 26, dtype=torch.float64).tolist()
    losses = [loss for _, loss in scorer([head * scale for scale in scales])]
    good_enough = min(losses) + 0.5 / scorer.count
    for scale, loss in zip(scales, losses, strict=True):
        if not loss > good_enough:
            return head * scale
    raise AssertionError("the smallest loss is good enough by definition")


@torch.inference_mode()
def features_of(network: Network, examples: Examples, rows: Tensor) -> Tensor:
    """Return the pooled features of these rows, (rows, width), on the CPU; the network is left in evaluation mode."""
    network.eval()
    device = Device.of(network)
    batches = []
    for batch_rows in rows.split(images_at_once(network, examples.entry, 512)):
        inputs = inputs_on(device, examples, batch_rows)
        with evaluation_precision(network):
            batches.append(fetch(network.features(inputs, examples.entry).float()))
    return torch.cat(batches)


def install_head(setup: RunSetup, engines: Engines) -> InitialModel | None:
    """Make a head from the clients' sums (or take a cached one), write it into the network, and measure it.

    Return its accuracy, loss and traffic; None where the config keeps the random or the stored
    head. Worker processes are ended.
    """
    if not setup.config.makes_head:
        return None
    network = setup.task.network
    scorer = _scorer(setup, engines)
    sums = engines.sums(setup.backbone_context, setup.head_clients)

    def make() -> dict[str, Tensor]:
        """Return the head, made now, and the bytes that it cost."""
        head = _make_head(setup, sums, scorer)
        return {"head": head, "traffic": torch.tensor([sums.up, sums.down])}

    cached = cached_tensors("heads", [*_head_recipe(setup), *engines.presence()], make, lambda: not sums.lost)
    head = cached["head"]
    bytes_up, bytes_down = cached["traffic"].tolist()
    engines.close()
    install(network, head)
    accuracy, loss = scorer([head])[0]
    log.info("head initialisation (%s): validation accuracy %.4f, loss %.4f", setup.config.head, accuracy, loss)
    return InitialModel(accuracy, loss, {"bytes_up": bytes_up, "bytes_down": bytes_down}, scorer)


def _head_recipe(setup: RunSetup) -> list[str]:
    """Return the words that a cached head is stored under: all that it depends on but who can be asked."""
    model_options = setup.config.model.model_dump_json(include={"ridge", "probe_steps", "head_clients"})
    network = setup.task.network
    return [
        "with traffic, one error",
        *Device.of(network).cache_words(precision_of(network)),
        setup.config.head,
        model_options,
        setup.config.data.model_dump_json(),
        digest(network, network.depth),
        *setup.task.data.identity,
        setup.task.transform.digest,
        str(setup.config.seed),
        *setup.left_out,
        *setup.algorithm.privacy.identity_words(),
    ]


def own_starts(setup: RunSetup, engines: Engines, space: EditSpace, initial: InitialModel | None) -> dict[int, Tensor]:
    """Return the vector each client starts from where clients share nothing: with a head of its own images alone.

    A head of everybody's sums would not be training alone. {} where heads are not made of sums or do not train.
    `initial` is the model with the common head, which is put back into the network.
    """
    provided = setup.algorithm.provides
    trains_alone = Capability.PERSONAL_MODELS in provided and Capability.EXCHANGE not in provided
    if initial is None or initial.scorer is None or not trains_alone or setup.task.data.blind:
        return {}
    network = setup.task.network
    trains_head = any(is_head(network, part.name) and part.index is None for part in space.parts)
    if not trains_head:
        return {}
    common_head = torch.cat([network.head.weight, network.head.bias[:, None]], 1).detach().clone()
    starts = {}
    for client in setup.federation.members:
        sums = engines.sums(setup.backbone_context, [client])
        install(network, _make_head(setup, sums, initial.scorer))
        starts[client] = space.gather(network)
    install(network, common_head)
    engines.close()
    return starts


def _scorer(setup: RunSetup, engines: Engines) -> HeadScorer:
    """Return the scorer of heads: on the server's images, or by requests on those that clients hold out.

    Without validation images the server measures on its first 1,000 training images.
    """
    data = setup.task.data
    context = setup.backbone_context
    if data.blind:
        if setup.algorithm.privacy.collects_sum:
            always = [client for client in setup.federation.members if setup.federation.takes_part_always(client)]
            return HiddenScorer(engines.sums(context, always))
        engine = engines.preparing(context)
        return RemoteScorer(engine, setup.federation.run, setup.federation.founders, example_counts_of(data))
    rows = data.validation_rows if len(data.validation_rows) else data.train_rows[:1000]
    features = features_of(setup.task.network, context.examples, rows)
    return LocalScorer(features, setup.task.train_images.labels[rows])


def _make_head(setup: RunSetup, sums: Sums, scorer: HeadScorer) -> Tensor:
    """Return a head (classes, width + 1) made from the clients' sums by the method of the config.

    Raises where the features of all images are the same, so that no equation for a head has a solution.
    """
    try:
        return _solve_for_head(setup, sums, scorer)
    except torch.linalg.LinAlgError as error:
        raise FedgraftError(
            "E-RUN-HEAD-SINGULAR",
            "no head can be made from the features of this network: they are the same for every image, or not finite",
            "check its weights and data.normalise, or set model.head=random",
        ) from error


def _solve_for_head(setup: RunSetup, sums: Sums, scorer: HeadScorer) -> Tensor:
    """Return the head (classes, width + 1) that solves the equations of the config's method."""
    method = setup.config.head
    options = setup.config.model
    if method == "probe":
        return probe_head(sums, options.probe_steps)
    if method == "ncm":
        return calibrate_temperature(ncm_head(sums), scorer)
    if method == "cof":
        penalties = GRID if options.ridge is None else (options.ridge,)
        head, _ = strongest_penalty(cof_heads(client_class_sums(sums), penalties), scorer)
        return calibrate_temperature(head, scorer)
    if method == "lda":
        statistics = sums.ask(action_named("statistics"))
        shrinkages = GRID if options.ridge is None else (min(1.0, options.ridge),)
        head, _ = strongest_penalty(lda_heads(statistics["gram"], statistics["cross"], shrinkages), scorer)
        return calibrate_temperature(head, scorer)
    head, penalty = ridge_head(sums, options.ridge, scorer)
    if len(sums.clients) > 1:  # a line for each client that starts alone would bury the others
        log.info("head initialisation: ridge penalty %g", penalty)
    return calibrate_temperature(head, scorer)
