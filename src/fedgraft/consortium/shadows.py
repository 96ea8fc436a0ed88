"""Membership inference against shadow models, in a simulation: the same run with half of each site's images.

An image that is hard has a large loss whether or not it was trained on. So the loss of the delivered model is compared
with that of models that did not see the image: the same config, trained on a random half of the images of each site.
Half of the shadows leave each image out. The scores of single images are made and counted here, as each site would do
for its own; only the histograms are returned.
Carlini et al., Membership inference attacks from first principles (2022), their offline attack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedgraft.client.actions.membership import member_rows
from fedgraft.client.context import ClientContext
from fedgraft.config.load import Config, to_toml
from fedgraft.core.device import fetch
from fedgraft.core.label_sets import image_losses
from fedgraft.core.protocols import Examples
from fedgraft.core.rng import numpy_stream, torch_stream
from fedgraft.data.federated import FederatedData
from fedgraft.metrics import membership
from fedgraft.metrics.evaluate import logits_of
from fedgraft.runs.adapted import Adapted, reopened
from fedgraft.runs.loop import run_setup
from fedgraft.runs.setup import setup_of
from fedgraft.runs.tracking import Progress

WIDEST_SCORE = 6.0
"""Scores are in standard deviations; beyond so many they count in the outermost bin."""


@dataclass(frozen=True)
class Shadow:
    """One shadow model, and the training rows that it was trained on."""

    run: Adapted
    trained: frozenset[int]


def half_of(data: FederatedData, seed: int, pair: int, second: bool) -> FederatedData:
    """Return the data with half of each client's training rows, drawn for the pair of shadow models number `pair`.

    The `second` shadow model of the pair has the other half. Test rows stay as they are.
    """
    partition = data.partition
    kept = []
    offsets = [0]
    for client in range(partition.clients):
        rows = partition.train_rows(client)
        shuffled = numpy_stream(seed, "shadow", pair, client).permutation(len(rows))
        middle = (len(rows) + 1) // 2
        chosen = shuffled[middle:] if second else shuffled[:middle]
        kept.append(np.sort(rows[chosen]))
        offsets.append(offsets[-1] + len(chosen))
    # `Partition` refuses test rows of a class without training rows, except of clients with names: a half may lack one.
    smaller = replace(partition, offsets=np.asarray(offsets), rows=np.concatenate(kept), names=data.client_names)
    return replace(data, partition=smaller)


def train_shadows(
    config: Config,
    data: FederatedData,
    folder: Path,
    count: int,
    progress: Callable[[], Progress],
    report: Callable[[str], None],
) -> list[Shadow]:
    """Return `count` shadow models of a config, trained in `folder` or found there; an interrupted one goes on.

    `progress` makes the display of a run, `report` prints a line.
    """
    shadows = []
    for number in range(count):
        halved = half_of(data, config.seed, number // 2, bool(number % 2))
        place = folder / f"shadow-{number}"
        report(f"shadow model {number + 1} of {count}, on half of each site's images, in {place}")
        identity = f"{config.digest}-shadow-{number}"
        build = lambda secret, halved=halved: (setup_of(config, halved, secret=secret), None)  # noqa: E731
        run_setup(build, place, identity, to_toml(config), progress(), console=False)
        shadows.append(_opened(config, halved, place, identity))
    return shadows


def _opened(config: Config, data: FederatedData, folder: Path, identity: str) -> Shadow:
    """Return the shadow model of a finished run."""
    from fedgraft.runs import checkpoint
    from fedgraft.runs.folder import RunFolder

    latest = checkpoint.load_latest(RunFolder.open(folder).checkpoints, identity)
    assert latest is not None  # the run has just ended
    run = reopened(setup_of(config, data, for_training=False), latest)
    trained: set[int] = set()
    for client in range(data.clients):
        trained.update(data.rows(client).tolist())
    return Shadow(run, frozenset(trained))


def shadow_sums(target: Adapted, shadows: list[Shadow], rare: Tensor, smallest: int) -> dict[int, Mapping[str, Tensor]]:
    """Return the sums of `metrics.membership` of the scores against the shadows, by client.

    A member's score is made with the shadows that did not see it: one of each pair. No shadow saw a test image, and one
    of each pair is drawn for it, so that both kinds of images are compared with the same models.
    """
    by_client: dict[int, Mapping[str, Tensor]] = {}
    data = target.setup.task.data
    for client in range(data.clients):
        rows = member_rows(target.opened.context, client)
        left_out = torch.tensor([[int(row) not in shadow.trained for shadow in shadows] for row in rows.tolist()])
        members = _scores(target, shadows, rows, left_out.reshape(len(rows), len(shadows)), of_tests=False)
        test_rows = data.test_rows(client)
        drawn = drawn_for_tests(target.setup.config.seed, client, len(test_rows), len(shadows))
        outsiders = _scores(target, shadows, test_rows, drawn, of_tests=True)
        spread = _spread(members[1], outsiders[1])
        sides = []
        for (loss, out_losses, labels, right), counted in ((members, left_out), (outsiders, drawn)):
            mean = _mean_over(out_losses, counted.reshape(out_losses.shape))
            score = membership.shadow_score(loss, mean, spread)
            bins = membership.bins_of(score, -WIDEST_SCORE, WIDEST_SCORE)
            is_rare = membership.is_of_rare_class(labels, rare)
            sides.append(membership.side_sums(bins, right, is_rare, smallest))
        by_client[client] = membership.join_sides(*sides)
    return by_client


def drawn_for_tests(seed: int, client: int, images: int, shadows: int) -> Tensor:
    """Return which shadows each test image is compared with, bool (images, shadows): one of each pair, at random."""
    seconds = torch.randint(0, 2, (images, (shadows + 1) // 2), generator=torch_stream(seed, "shadow tests", client))
    number = torch.arange(shadows)
    return seconds[:, number // 2] == number % 2


def _scores(
    target: Adapted, shadows: list[Shadow], rows: Tensor, left_out: Tensor, of_tests: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log losses of the target (n,), of the shadows (n, shadows), the labels, and the target's right answers.

    Losses of shadows that saw an image (`left_out` is False there) are NaN.
    """
    examples = _examples(target.opened.context, of_tests)
    logits = logits_of(target.network, examples, rows)
    labels = fetch(examples.labels[rows])
    losses = []
    for shadow in shadows:
        theirs = _examples(shadow.run.opened.context, of_tests)
        losses.append(_log_losses(logits_of(shadow.run.network, theirs, rows), labels))
    out = torch.stack(losses, dim=1) if len(rows) else torch.zeros(0, len(shadows), dtype=torch.float64)
    out = out.masked_fill(~left_out, float("nan"))
    return _log_losses(logits, labels), out, labels, membership.right_answers(logits, labels)


def _examples(context: ClientContext, of_tests: bool) -> Examples:
    if of_tests and context.tests is not None:
        return context.tests
    return context.examples


def _log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return image_losses(logits.double(), labels).clamp(min=10.0**membership.LEAST_LOG).log10()


def _mean_over(losses: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of each row over the entries that are counted, (n,); 0 where none is."""
    return losses.masked_fill(~counted, 0.0).nansum(1) / counted.sum(1).clamp(min=1)


def _spread(*parts: Tensor) -> float:
    """Return the standard deviation of the losses of an image over the shadows, pooled over images; 1 without any."""
    squares = 0.0
    freedom = 0
    for losses in parts:
        counted = ~losses.isnan()
        deviation = (losses - _mean_over(losses, counted)[:, None]).masked_fill(~counted, 0.0)
        squares += float((deviation**2).sum())
        freedom += int((counted.sum(1) - 1).clamp(min=0).sum())
    if not freedom or not squares:
        return 1.0
    return (squares / freedom) ** 0.5
