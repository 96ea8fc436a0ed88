"""A head from the sums of some clients: the others' images are not looked at before they train."""

from __future__ import annotations

import pytest
import torch
from tests.support.tiny import Open, tiny

from fedgraft.runs.head_init import calibrate_temperature, features_of, solve

SOME = ["partition.clients=6", "data.limit=120", "model.head_clients=0.5"]


@pytest.mark.parametrize("secure", [[], ["privacy.aggregation=secure"]])
def test_the_head_is_that_of_the_pooled_images_of_those_who_were_asked(secure: list[str]) -> None:
    ready = Open(tiny(*SOME, *secure))
    drawn = ready.setup.head_clients
    assert len(drawn) == 3 and drawn == sorted(set(drawn))
    examples = ready.setup.backbone_context.examples
    rows = torch.cat([ready.data.rows(k) for k in drawn])
    z = features_of(ready.network, examples, rows).double()
    z = torch.cat([z, torch.ones(len(z), 1).double()], 1)
    y = torch.nn.functional.one_hot(ready.task.train_images.labels[rows], ready.data.classes).double()
    assert ready.start is not None and ready.start.scorer is not None
    wanted = calibrate_temperature(solve(z.T @ z, z.T @ y, 1.0), ready.start.scorer)
    installed = torch.cat([ready.network.head.weight, ready.network.head.bias[:, None]], 1).detach().double()
    assert torch.allclose(installed, wanted, rtol=1e-3 if secure else 1e-5, atol=1e-4 if secure else 1e-6)


def test_it_costs_its_share_of_the_bytes_and_all_is_as_without() -> None:
    starts = [
        Open(tiny("partition.clients=6", "data.limit=120", word)).start
        for word in ("model.head_clients=0.5", "model.head_clients=1.0", "seed=0")
    ]
    up = [start.traffic["bytes_up"] for start in starts if start is not None]
    assert up[1] == 2 * up[0] and starts[1] == starts[2]
