"""Images that a client sets aside to learn its self-weight are never trained on."""

from __future__ import annotations

import torch
from tests.support.toy import Toy, client_rows
from torch import Tensor

from fedgraft import algorithms as zoo
from fedgraft.local.self_weight import split_aside


def test_no_step_sees_an_image_that_was_set_aside() -> None:
    toy = Toy(zoo.fedshibu(similarity="learned", aside=0.3), per_round=5)
    trained: set[int] = set()
    measured: set[int] = set()
    read = toy.examples.batch

    def batch(rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        seen = measured if generator is None else trained  # training alone draws augmentations
        seen.update(rows.tolist())
        return read(rows, generator)

    toy.examples.batch = batch  # type: ignore[method-assign]
    toy.run(3)
    aside = {int(row) for k in range(5) for row in split_aside(client_rows(k), 0.3, 7, k)[1]}
    assert aside and trained
    assert not aside & trained
    assert aside <= measured
