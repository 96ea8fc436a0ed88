"""Links of the update: what each does to it, and in which order a chain works."""

from __future__ import annotations

import torch

from fedgraft.local.update_links import Sending, normalise, run_chain
from fedgraft.privacy.dp import Mechanism
from fedgraft.privacy.protection import DifferentialPrivacy

UPDATE = torch.tensor([6.0, 8.0, 100.0])
SENDING = Sending(effective_steps=2.0, settings={"clip": 1.0}, trained=2)
"""Two trained coordinates and one statistic behind them."""


def test_normalising_divides_what_was_trained_and_no_statistics() -> None:
    update, told = run_chain((normalise(),), UPDATE, SENDING)
    assert update.tolist() == [3.0, 4.0, 100.0] and told == {"tau": 2.0}
    assert UPDATE.tolist() == [6.0, 8.0, 100.0]  # the client's own vector stays


def test_links_work_one_after_the_other() -> None:
    """Normalised to (3, 4), of length 5, then clipped to (0.6, 0.8); the other way round it would be half as long."""
    clip = DifferentialPrivacy(Mechanism(0.0, 1.0, 1)).link()
    sending = Sending(2.0, {"clip": 1.0}, 2)
    update, _ = run_chain((normalise(), clip), UPDATE[:2], sending)
    torch.testing.assert_close(update, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
