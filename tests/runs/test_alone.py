"""Clients that share nothing start from heads of their own images; with a common start, training alone is not alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tiny import Open, tiny, without_pictures
from torch import Tensor

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client import train as client_train
from fedgraft.client.context import ClientContext
from fedgraft.core.messages import Request
from fedgraft.core.space import Bound
from fedgraft.local.train import Trained
from fedgraft.runs.centralized import run_centralized
from fedgraft.runs.head_init import features_of, own_starts
from fedgraft.runs.loop import run

ALONE = ("algorithm.name=local_only", "trainable.kind=head", "partition.kind=dirichlet")


def test_each_start_is_scikit_learns_ridge_head_of_the_clients_own_images_up_to_its_scale() -> None:
    from sklearn.linear_model import Ridge

    made = Open(tiny(*ALONE))
    starts = own_starts(made.setup, made.engines, made.space, made.start)
    before = made.space.gather(made.network)
    for client, vector in starts.items():
        rows = made.data.rows(client)
        z = features_of(made.network, made.setup.backbone_context.examples, rows).double()
        targets = torch.nn.functional.one_hot(made.task.train_images.labels[rows], made.network.classes) - 0.1
        theirs = Ridge(alpha=float(z.square().sum(0).mean()), solver="cholesky").fit(z.numpy(), targets.numpy())
        made.space.scatter(vector, made.network)
        ours = made.network.head.weight.detach().double().numpy()
        scale = (ours * theirs.coef_).sum() / np.square(theirs.coef_).sum()
        np.testing.assert_allclose(ours, scale * theirs.coef_, rtol=1e-3, atol=1e-4 * np.abs(ours).max())
    assert len(starts) == 3 and not any(torch.equal(vector, before) for vector in starts.values())


@pytest.mark.parametrize(
    "overrides",
    [
        ("algorithm.name=fedavg",),
        ("model.head=random",),
        ("trainable.kind=body",),
        ("algorithm.name=central", "partition.clients=1"),
    ],
    ids=["shared", "random head", "head frozen", "all in one place"],
)
def test_where_clients_share_or_have_no_head_of_sums_they_start_together(overrides: tuple[str, ...]) -> None:
    made = Open(tiny(*ALONE, *overrides))
    assert own_starts(made.setup, made.engines, made.space, made.start) == {}


def test_all_in_one_place_every_epoch_goes_on_from_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start of its own once held centralised training at its first vector: each epoch began there again."""
    begun, ended, fit = list[Tensor](), list[Tensor](), client_train._fit

    def watched(request: Request, algorithm: Algorithm, context: ClientContext, bound: Bound, *rest: Any) -> Trained:
        begun.append(bound.values.detach().clone())
        result = fit(request, algorithm, context, bound, *rest)
        ended.append(bound.values.detach().clone())
        return result

    monkeypatch.setattr(client_train, "_fit", watched)
    with without_pictures():
        run_centralized(tiny("centralized.kind=probe", "centralized.epochs=3"), tmp_path / "run", console=False)
    assert len(begun) == 3
    for before, after in zip(ended, begun[1:], strict=False):
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_starts_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    with without_pictures():
        summaries = [
            run(
                tiny(*ALONE, "personal.evaluate=end", f"rounds.personal_memory_mb={mb}"),
                tmp_path / str(mb),
                console=False,
            )
            for mb in (100, 0)
        ]
    assert summaries[0]["personal"] == summaries[1]["personal"]
