"""Evaluate a network: loss, accuracies, and the sums that all other metrics are computed from.

Evaluation draws no random numbers and leaves weights and statistics as they are; it switches the network to
evaluation mode.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgraft.core.device import Device, evaluation_precision, fetch, inputs_on
from fedgraft.core.label_sets import are_label_sets, exact_matches, loss_sum
from fedgraft.core.progress import phase
from fedgraft.core.protocols import Examples, Network
from fedgraft.local.forward_memory import images_at_once
from fedgraft.metrics.label_scores import count_label_scores
from fedgraft.metrics.scores import LOSS_LIMIT, count_scores, true_class_rank
from fedgraft.metrics.sums import merge_sums

TOP_K = 5
"""An image counts for `top5` if its class is among this many highest scores."""


EVALUATION_BATCH = 512
"""Images that are evaluated at once."""


@dataclass(frozen=True)
class Evaluation:
    """Mean loss and accuracies (fractions) over `count` examples. Law: `a + b` is the evaluation of both sets.

    Of label sets the accuracy is the share of examples whose known labels are all right at a probability of one half;
    there `top5` has no meaning and is the same number.
    """

    loss: float
    accuracy: float
    top5: float
    count: int

    def __add__(self, other: Evaluation) -> Evaluation:
        """Return the evaluation of both sets together: means weighted by the number of examples."""
        n = self.count + other.count
        own_weight = self.count / max(1, n)
        other_weight = other.count / max(1, n)
        return Evaluation(
            own_weight * self.loss + other_weight * other.loss,
            own_weight * self.accuracy + other_weight * other.accuracy,
            own_weight * self.top5 + other_weight * other.top5,
            n,
        )


@dataclass(frozen=True)
class _BatchResult:
    """The counts of one batch: summed loss, correct predictions, and the sums of `metrics.scores`."""

    loss: float
    correct: int
    within_top_k: int
    sums: dict[str, Tensor]


def evaluate(
    network: Network, examples: Examples, rows: Tensor, batch_size: int = EVALUATION_BATCH, threads: int = 1
) -> Evaluation:
    """Return loss and accuracies on these rows, in evaluation mode and with the evaluation transform.

    Several threads may work on batches; their results are added in the order of the rows, so the bits are the same for
    any number of threads. With more than one thread, `examples` must already have computed what they compute only once.
    """
    evaluation, _ = evaluate_with_sums(network, examples, rows, batch_size, threads, scores=False)
    return evaluation


def evaluate_with_sums(
    network: Network,
    examples: Examples,
    rows: Tensor,
    batch_size: int = EVALUATION_BATCH,
    threads: int = 1,
    scores: bool = True,
    largest_loss: float = LOSS_LIMIT,
) -> tuple[Evaluation, dict[str, Tensor]]:
    """Return loss and accuracies on these rows, and the sums of `metrics.scores` by name ({} if `scores` is false).

    The network is left in evaluation mode. `threads` work on batches without changing the bits, as in `evaluate`.
    In the sums an image's loss counts up to `largest_loss`.
    """
    network.eval()
    batches = rows.split(images_at_once(network, examples.entry, batch_size))
    loss = 0.0
    correct = 0
    within_top_k = 0
    sums: dict[str, Tensor] = {}
    with phase("evaluation", len(rows), "images") as progress:

        def measure(batch: Tensor) -> _BatchResult:
            """Return the counts of one batch of rows, and report it as progress."""
            result = _evaluate_batch(network, examples, batch, scores, largest_loss)
            progress.advance(len(batch))
            return result

        if scores:
            sums = merge_sums([], network.classes, network.label_sets)
        # Added up as they come: the sums of one batch are megabytes where classes are many.
        for result in _in_order(measure, batches, threads):
            loss += result.loss
            correct += result.correct
            within_top_k += result.within_top_k
            if scores:
                sums = merge_sums([sums, result.sums], network.classes, network.label_sets)
    n = max(1, len(rows))
    return Evaluation(loss / n, correct / n, within_top_k / n, len(rows)), sums


@torch.inference_mode()
def logits_of(network: Network, examples: Examples, rows: Tensor, batch_size: int = EVALUATION_BATCH) -> Tensor:
    """Return the logits of these rows, float32 (n, C) on the CPU; the network is left in evaluation mode."""
    network.eval()
    parts = [torch.zeros(0, network.classes)]
    for batch in rows.split(images_at_once(network, examples.entry, batch_size)):
        inputs = inputs_on(Device.of(network), examples, batch)
        with evaluation_precision(network):
            parts.append(fetch(network(inputs, examples.entry).float()))
    return torch.cat(parts)


def _in_order(
    measure: Callable[[Tensor], _BatchResult], batches: Sequence[Tensor], threads: int
) -> Iterator[_BatchResult]:
    """Yield the result of each batch in order, measured in threads that are at most a few batches ahead."""
    if min(threads, len(batches)) <= 1:
        yield from map(measure, batches)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[_BatchResult]] = deque()
        for batch in batches:
            waiting.append(pool.submit(measure, batch))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def evaluation_of(sums: Mapping[str, Tensor]) -> Evaluation:
    """Return loss and accuracies from the sums for metrics alone; without images all are zero."""
    if "matches" in sums:
        images = int(sums["matches"][0])
        exact = float(sums["matches"][1]) / max(1, images)
        return Evaluation(float(sums["loss"][0]) / max(1, images), exact, exact, images)
    images = int(sums["confusion"].sum())
    n = max(1, images)
    correct = float(sums["confusion"].diagonal().sum())
    return Evaluation(float(sums["loss"][0]) / n, correct / n, float(sums["top5"][0]) / n, images)


@torch.inference_mode()
def _evaluate_batch(
    network: Network, examples: Examples, rows: Tensor, scores: bool, largest_loss: float
) -> _BatchResult:
    """Return the counts of one batch of rows, with the sums of `metrics.scores` if `scores` is true."""
    labels = examples.labels[rows]
    inputs = inputs_on(Device.of(network), examples, rows)
    with evaluation_precision(network):
        logits = fetch(network(inputs, examples.entry).float())
    if are_label_sets(labels):
        matches = int(exact_matches(logits, labels).sum())
        label_sums: dict[str, Tensor] = {}
        if scores:
            label_sums = count_label_scores(logits, labels, largest_loss)
        return _BatchResult(float(loss_sum(logits, labels)), matches, matches, label_sums)
    rank = true_class_rank(logits, labels)
    correct = int((rank == 0).sum())
    within_top_k = int((rank < TOP_K).sum())
    loss = float(loss_sum(logits, labels))
    sums: dict[str, Tensor] = {}
    if scores:
        sums = count_scores(logits, labels, network.classes, largest_loss)
    return _BatchResult(loss, correct, within_top_k, sums)
