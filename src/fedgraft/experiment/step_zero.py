"""Step 0: a head for the pretrained trunk, from sums over clients, so that no image and no feature moves.

`ridge` solves the normal equations of the summed statistics; `probe` minimises the summed logistic loss by L-BFGS.
Both are exactly what the pooled data would give. The regularisation and the scale of a ridge head are chosen on the
server's validation images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedgraft.contracts import Examples, Network
from fedgraft.messages import Order, Reply
from fedgraft.round import Engine

GRID = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)


def ask(engine: Engine, run: str, clients: Sequence[int], action: str, **auxiliary: Tensor) -> list[Reply]:
    """Send one action to all clients; answers in client order."""
    orders = [Order(run, -1, k, action, auxiliary=auxiliary) for k in clients]
    replies = [r for r in engine.exchange(orders) if isinstance(r, Reply)]
    return sorted(replies, key=lambda reply: reply.client)


def ridge_head(
    engine: Engine, run: str, clients: Sequence[int], penalty: float | None, judge: Callable[[Tensor], tuple[float, float]]
) -> tuple[Tensor, float]:
    """The ridge head (classes, width+1; last column is the bias) and its penalty.

    `judge(head) -> (accuracy, loss)` on validation images picks the penalty when none is given.
    """
    replies = ask(engine, run, clients, "statistics")
    gram = torch.stack([r.sums["gram"] for r in replies]).sum(0)
    cross = torch.stack([r.sums["cross"] for r in replies]).sum(0)
    grid = GRID if penalty is None else (penalty,)
    heads = [(solve(gram, cross, value), value) for value in grid]
    return max(heads, key=lambda pair: judge(pair[0])[0]) if len(heads) > 1 else heads[0]


def solve(gram: Tensor, cross: Tensor, penalty: float) -> Tensor:
    """(ZᵀZ + λI)⁻¹ ZᵀY on centred targets; λ is relative to the mean energy of a feature, the bias is not punished."""
    width = len(gram) - 1
    energy = gram.diagonal()[:width].mean()
    damping = torch.eye(width + 1, dtype=gram.dtype) * penalty * energy
    damping[width, width] = 0
    targets = cross.clone()
    targets -= gram[:, -1:] / cross.shape[1]  # labels become ±: one-hot minus 1/C, so that unseen classes stay at rest
    return torch.linalg.solve(gram + damping, targets).T


def probe_head(engine: Engine, run: str, clients: Sequence[int], start: Tensor, steps: int, decay: float = 1e-4) -> Tensor:
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


def judge_on(features: Tensor, labels: Tensor) -> Callable[[Tensor], tuple[float, float]]:
    """Accuracy and loss of a head on these features."""
    z = torch.cat([features.double(), torch.ones(len(features), 1, dtype=torch.float64)], 1)

    def judge(head: Tensor) -> tuple[float, float]:
        logits = z @ head.T
        return float((logits.argmax(1) == labels).double().mean()), float(cross_entropy(logits, labels))

    return judge


def tempered(head: Tensor, judge: Callable[[Tensor], tuple[float, float]]) -> Tensor:
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
    return torch.cat([network.features(examples.batch(part), examples.entry) for part in rows.split(512)])
