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
from torch.nn.functional import cross_entropy

from fedgraft.client.actions import action_named
from fedgraft.core.errors import FedgraftError
from fedgraft.core.messages import Request, Response
from fedgraft.core.network_digest import digest
from fedgraft.core.progress import phase
from fedgraft.core.protocols import Examples, Network
from fedgraft.core.space import EditSpace
from fedgraft.edit.trainable import is_head
from fedgraft.metrics.evaluate import Evaluation
from fedgraft.metrics.scores import predicted_classes
from fedgraft.runs.closed_form import client_class_sums, cof_heads, ncm_head
from fedgraft.runs.engines import Engines
from fedgraft.runs.kept import kept_tensors
from fedgraft.runs.open_run import claims_of
from fedgraft.runs.setup import RunSetup
from fedgraft.server.collect import Engine
from fedgraft.server.example_counts import ExampleCounts
from fedgraft.server.expected import counted, counts, replies_to
from fedgraft.server.secure_sum import Sums

log = logging.getLogger("fedgraft")

GRID = tuple(10.0**e for e in (-5, -4, -3, -2.5, -2, -1.5, -1, -0.5, 0))


class Judge(Protocol):
    """Says how good heads are, on `count` images."""

    count: int

    def __call__(self, heads: Sequence[Tensor]) -> list[tuple[float, float]]:
        """(accuracy, loss) of each."""
        ...


@dataclass(frozen=True)
class Start:
    """How the model the run begins with does on validation images."""

    accuracy: float
    loss: float
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that its head cost, counted as those of rounds are."""
    judge: Judge | None = field(default=None, repr=False, compare=False)
    """What measured it."""


def install(network: Network, head: Tensor) -> None:
    """Write a (classes, width+1) head into the network."""
    with torch.no_grad():
        network.head.weight.copy_(head[:, :-1])
        network.head.bias.copy_(head[:, -1])


def ridge_head(sums: Sums, penalty: float | None, judge: Judge) -> tuple[Tensor, float]:
    """The ridge head (classes, width+1; last column is the bias) and its penalty, chosen on validation if not given."""
    found = sums.ask(action_named("statistics"))
    gram, cross = found["gram"], found["cross"]
    heads = [(solve(gram, cross, value), value) for value in (GRID if penalty is None else (penalty,))]
    return strongest(heads, judge)


def strongest(heads: Sequence[tuple[Tensor, float]], judge: Judge) -> tuple[Tensor, float]:
    """The largest penalty whose accuracy lies within one standard error of the best.

    A head that is hardly punished scores as well here but has huge weights along directions of little variance, and
    a body trained through it would be thrown about.
    """
    scores = [accuracy for accuracy, _ in judge([head for head, _ in heads])]
    best = max(scores)
    slack = (best * (1 - best) / judge.count) ** 0.5
    return max((pair for pair, score in zip(heads, scores, strict=True) if score >= best - slack), key=lambda p: p[1])


def solve(gram: Tensor, cross: Tensor, penalty: float) -> Tensor:
    """(ZᵀZ + λI)⁻¹ ZᵀY on centred targets; λ is relative to the mean energy of a feature, the bias is not punished."""
    width = len(gram) - 1
    energy = gram.diagonal()[:width].mean()
    damping = torch.eye(width + 1, dtype=gram.dtype) * penalty * energy
    damping[width, width] = 0
    targets = cross.clone()
    targets -= gram[:, -1:] / cross.shape[1]  # labels become ±: one-hot minus 1/C, so that unseen classes stay at rest
    return torch.linalg.solve(gram + damping, targets).T


def probe_head(sums: Sums, steps: int, decay: float = 1e-3, damping: float = 1e-4) -> Tensor:
    """Logistic regression by L-BFGS; every evaluation is one sum of the clients' losses and gradients.

    It is fitted on whitened features (mean and covariance come from the summed statistics), where all directions have
    the same scale: a few dozen evaluations then do what thousands would do on raw features. The result is mapped back.
    """
    from scipy.optimize import minimize

    found = sums.ask(action_named("statistics"))
    gram, classes = found["gram"], found["cross"].shape[1]
    total = float(gram[-1, -1])
    mean = gram[:-1, -1] / total  # (d,)
    covariance = gram[:-1, :-1] / total - torch.outer(mean, mean)
    covariance += damping * covariance.diagonal().mean() * torch.eye(len(mean), dtype=gram.dtype)
    unmix = torch.linalg.inv(torch.linalg.cholesky(covariance))  # (d, d): z -> unmix (z - mean) is white

    def raw(flat: np.ndarray) -> Tensor:
        white = torch.from_numpy(flat.reshape(classes, -1))
        weight = white[:, :-1] @ unmix
        return torch.cat([weight, (white[:, -1] - weight @ mean)[:, None]], 1)

    known: dict[bytes, Mapping[str, Tensor]] = {}  # clients give each secure sum once; a line search may ask again

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        head = raw(flat)
        key = head.numpy().tobytes()
        found = (
            known[key] if key in known else known.setdefault(key, sums.ask(action_named("head_gradient"), head=head))
        )
        count = float(found["count"])
        gradient = found["gradient"] / count
        centred = gradient[:, :-1] - torch.outer(gradient[:, -1], mean)
        white = torch.cat([centred @ unmix.T, gradient[:, -1:]], 1).numpy().ravel()
        loss = float(found["loss"]) / count + 0.5 * decay * float((flat**2).sum())
        return loss, white + decay * flat

    start = np.zeros(classes * (len(mean) + 1))
    limits = {"maxiter": steps, "ftol": 1e-12, "gtol": 1e-8}
    with phase("head initialisation: logistic regression", steps, "steps") as told:
        best = minimize(
            objective, start, jac=True, method="L-BFGS-B", options=limits, callback=lambda _: told.advance()
        )
    return raw(best.x)


class LocalScorer:
    """Accuracy and loss of a head on these features, the server's own."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.z = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
        self.labels, self.count = labels, len(labels)

    def __call__(self, heads: Sequence[Tensor]) -> list[tuple[float, float]]:
        """(accuracy, loss) of each."""
        found = []
        for head in heads:
            logits = self.z @ head.T
            right = float((predicted_classes(logits) == self.labels).double().mean())
            found.append((right, float(cross_entropy(logits, self.labels))))
        return found


class RemoteScorer:
    """Accuracy and loss of heads on images that the clients hold out; only counts and sums of losses come back."""

    def __init__(self, engine: Engine, run: str, clients: Sequence[int], example_counts: ExampleCounts) -> None:
        self.engine, self.run, self.clients, self.example_counts, self.count = engine, run, clients, example_counts, 1

    def __call__(self, heads: Sequence[Tensor]) -> list[tuple[float, float]]:
        """(accuracy, loss) of each, over the images of all clients."""
        models = {"heads": torch.stack(list(heads)).double()}
        requests = [Request(self.run, -1, k, "count", auxiliary=models) for k in self.clients]
        expected = counts(requests, len(heads), self.example_counts, "validation")
        measured = summed_counts(
            replies_to(self.engine.exchange, requests, expected), self.example_counts, "validation"
        )
        self.count = max(1, measured[0].count)
        return [(one.accuracy, one.loss) for one in measured]


def summed_counts(responses: Sequence[Response], example_counts: ExampleCounts, split: str) -> list[Evaluation]:
    """What clients counted, (models, 4) each: right, among the first five, sum of losses, images; summed over them."""
    weights = counted(responses, example_counts, split)
    total = sum(
        (response.sums["counts"] * weights[response.client] for response in responses), torch.zeros(1, 4).double()
    )
    if not total[0, 3]:
        raise FedgraftError(f"no client has {split} images to measure the model on; raise data.validation.")
    return [Evaluation(float(s / n), float(a / n), float(b / n), int(n)) for a, b, s, n in total]


def calibrate_temperature(head: Tensor, judge: Judge) -> Tensor:
    """The head scaled so that its softmax is honest: least squares gives directions, not log-odds.

    The smallest scale within one standard error of the best: half a nat in the likelihood of all images (Wilks 1938).
    Few images that are all right would like an endless scale: a head sure of everything, without a gradient.
    """
    scales = torch.logspace(0, 2.5, 26, dtype=torch.float64).tolist()
    losses = [loss for _, loss in judge([head * scale for scale in scales])]
    enough = min(losses) + 0.5 / judge.count
    return head * next(scale for scale, loss in zip(scales, losses, strict=True) if not loss > enough)


@torch.inference_mode()
def features_of(network: Network, examples: Examples, rows: Tensor) -> Tensor:
    """Pooled features of these rows."""
    network.eval()
    device = next(network.parameters()).device
    return torch.cat([network.features(examples.batch(p).to(device), examples.entry).cpu() for p in rows.split(512)])


def install_head(setup: RunSetup, engines: Engines) -> Start | None:
    """Give the network a head made from the clients' sums, or leave it at its random start."""
    m, network, data = setup.config.model, setup.task.network, setup.task.data
    if setup.config.head == "random":
        return None
    context = setup.backbone_context
    judge = _judge(setup, engines)
    hidden = [
        *setup.left_out,
        *setup.algorithm.privacy.identity_words(),
    ]  # rounded sums give other last bits
    recipe = (
        setup.config.head,
        m.model_dump_json(include={"ridge", "probe_steps", "head_clients"}),
        setup.config.data.model_dump_json(),
    )
    identity = [digest(network, network.depth), *data.identity, setup.task.transform.digest, str(setup.config.seed)]
    sums = engines.sums(context, setup.head_clients)

    def make() -> dict[str, Tensor]:
        made = _make_head(setup, sums, judge)
        return {"head": made, "traffic": torch.tensor([sums.up, sums.down])}

    kept = kept_tensors("heads", ["with traffic, one error", *recipe, *identity, *hidden], make, lambda: not sums.lost)
    head, (up, down) = kept["head"], kept["traffic"].tolist()
    engines.close()
    install(network, head)
    start = Start(*judge([head])[0], {"bytes_up": up, "bytes_down": down}, judge)
    log.info(
        "head initialisation (%s): validation accuracy %.4f, loss %.4f", setup.config.head, start.accuracy, start.loss
    )
    return start


def own_starts(setup: RunSetup, engines: Engines, space: EditSpace, start: Start | None) -> dict[int, Tensor]:
    """Where clients share nothing: the vector each one starts from, with the head that its own images alone give.

    A head of everybody's sums would not be training alone. Empty where heads are not made of sums or do not train.
    """
    network, head = setup.task.network, setup.task.network.head
    trains = any(is_head(network, part.name) and part.index is None for part in space.parts)
    judge = None if start is None else start.judge
    alone = (
        setup.algorithm.aggregate.personal and not setup.algorithm.aggregate.shares
    )  # else models would never advance
    if judge is None or not alone or setup.task.data.blind or not trains:
        return {}
    common = torch.cat([head.weight, head.bias[:, None]], 1).detach().clone()
    found = {}
    for client in setup.federation.members:
        install(network, _make_head(setup, engines.sums(setup.backbone_context, [client]), judge))
        found[client] = space.gather(network)
    install(network, common)
    engines.close()
    return found


def _judge(setup: RunSetup, engines: Engines) -> Judge:
    """On the server's images, or on those that clients hold out."""
    data, context = setup.task.data, setup.backbone_context
    if data.blind:
        return RemoteScorer(
            engines.preparing(context), setup.federation.run, setup.federation.founders, claims_of(data)
        )
    rows = data.validation_rows if len(data.validation_rows) else data.train_rows[:1000]
    return LocalScorer(features_of(setup.task.network, context.examples, rows), setup.task.train_images.labels[rows])


def _make_head(setup: RunSetup, sums: Sums, judge: Judge) -> Tensor:
    m = setup.config.model
    if setup.config.head == "probe":
        return probe_head(sums, m.probe_steps)
    if setup.config.head == "ncm":
        return calibrate_temperature(ncm_head(sums), judge)
    if setup.config.head == "cof":
        head, penalty = strongest(cof_heads(client_class_sums(sums), GRID if m.ridge is None else (m.ridge,)), judge)
        return calibrate_temperature(head, judge)
    head, penalty = ridge_head(sums, m.ridge, judge)
    if len(sums.clients) > 1:  # a line for each client that starts alone would bury the others
        log.info("head initialisation: ridge penalty %g", penalty)
    return calibrate_temperature(head, judge)
