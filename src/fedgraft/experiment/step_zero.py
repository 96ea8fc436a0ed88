"""Step 0: a head for the pretrained trunk, from sums over clients, so that no image and no feature moves.

`ridge` solves the normal equations of the summed statistics; `probe` minimises the summed logistic loss by L-BFGS.
Both are exactly what the pooled data would give. The regularisation and the scale of a ridge head are chosen on the
server's validation images.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.contracts import Examples, Network
from fedgraft.messages import Order, Reply
from fedgraft.round import Engine

GRID = tuple(10.0**e for e in (-5, -4, -3, -2.5, -2, -1.5, -1, -0.5, 0))


def ask(engine: Engine, run: str, clients: Sequence[int], action: str, **auxiliary: Tensor) -> list[Reply]:
    """Send one action to all clients; answers in client order."""
    orders = [Order(run, -1, k, action, auxiliary=auxiliary) for k in clients]
    replies = [r for r in engine.exchange(orders) if isinstance(r, Reply)]
    return sorted(replies, key=lambda reply: reply.client)


def ridge_head(
    engine: Engine, run: str, clients: Sequence[int], penalty: float | None, judge: Judgement
) -> tuple[Tensor, float]:
    """The ridge head (classes, width+1; last column is the bias) and its penalty, chosen on validation if not given."""
    replies = ask(engine, run, clients, "statistics")
    gram = torch.stack([r.sums["gram"] for r in replies]).sum(0)
    cross = torch.stack([r.sums["cross"] for r in replies]).sum(0)
    heads = [(solve(gram, cross, value), value) for value in (GRID if penalty is None else (penalty,))]
    return strongest(heads, judge)


def strongest(heads: Sequence[tuple[Tensor, float]], judge: Judgement) -> tuple[Tensor, float]:
    """The largest penalty whose accuracy lies within one standard error of the best.

    A head that is hardly punished scores as well here but has huge weights along directions of little variance, and
    a body trained through it would be thrown about.
    """
    scores = [judge(head)[0] for head, _ in heads]
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


def probe_head(
    engine: Engine, run: str, clients: Sequence[int], start: Tensor, steps: int, decay: float = 1e-4
) -> Tensor:
    """Logistic regression by L-BFGS; every evaluation is one sum of the clients' losses and gradients."""
    from scipy.optimize import minimize

    total = sum(len_ for len_ in (r.examples for r in ask(engine, run, clients, "head_gradient", head=start)))

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        head = torch.from_numpy(flat.reshape(start.shape))
        replies = ask(engine, run, clients, "head_gradient", head=head)
        loss = sum(float(r.sums["loss"]) for r in replies) / total + 0.5 * decay * float((flat**2).sum())
        gradient = torch.stack([r.sums["gradient"] for r in replies]).sum(0) / total + decay * head
        return loss, gradient.numpy().ravel()

    found = minimize(objective, start.numpy().ravel(), jac=True, method="L-BFGS-B", options={"maxiter": steps})
    return torch.from_numpy(found.x.reshape(start.shape))


class Judgement:
    """Accuracy and loss of a head on these features, the server's own."""

    def __init__(self, features: Tensor, labels: Tensor) -> None:
        self.z = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)
        self.labels, self.count = labels, len(labels)

    def __call__(self, head: Tensor) -> tuple[float, float]:
        """(accuracy, loss)."""
        logits = self.z @ head.T
        return float((logits.argmax(1) == self.labels).double().mean()), float(cross_entropy(logits, self.labels))


def tempered(head: Tensor, judge: Judgement) -> Tensor:
    """The head scaled so that its softmax is honest: least squares gives directions, not log-odds."""
    scales = torch.logspace(0, 2.5, 26, dtype=torch.float64)
    return head * min(scales.tolist(), key=lambda scale: judge(head * scale)[1])


def install(network: Network, head: Tensor) -> None:
    """Write a (classes, width+1) head into the network."""
    with torch.no_grad():
        network.head.weight.copy_(head[:, :-1])
        network.head.bias.copy_(head[:, -1])


@torch.inference_mode()
def features_of(network: Network, examples: Examples, rows: Tensor) -> Tensor:
    """Pooled features of these rows."""
    network.eval()
    device = next(network.parameters()).device
    return torch.cat([network.features(examples.batch(p).to(device), examples.entry).cpu() for p in rows.split(512)])
