"""FedALA (Zhang et al. 2023): a client starts between its last model and the common one, coordinate by coordinate.

start = common + keep * (last - common), keep in [0, 1] and learned by gradient steps on the client's own images. The
paper writes 1 - keep; this way a keep of zero is the common model bit for bit, so a rate of zero is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgraft.core.protocols import Examples, Network
from fedgraft.local.losses import LossContext, cross_entropy
from fedgraft.local.train import Flat
from fedgraft.local.transfer import onto


@dataclass(frozen=True)
class AdaptiveStart:
    """How the start is learned: step size, on which share of the images, in how many of the last blocks."""

    rate: float = 1.0
    share: float = 0.8
    blocks: int = 1
    """The last so many blocks and the head are blended; what lies before is the common model's."""
    first_passes: int = 5
    """Passes over the images when a client learns its weights for the first time; later it is one. The paper goes on
    until the loss stands still."""

    def blend(self, common: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        """The model between the two; the common one for a client that has no other yet."""
        if "keep" not in memory:
            return common
        keep, trained = memory["keep"], len(memory["keep"])
        start = common.clone()
        start[:trained] += keep * (memory["previous_model"][:trained] - common[:trained])
        return start

    def learned(
        self,
        network: Network,
        flat: Flat,
        where: Tensor,
        examples: Examples,
        rows: Tensor,
        memory: Mapping[str, Tensor],
        stream: torch.Generator,
    ) -> Tensor:
        """The weights `keep` (trained,) for the model that `flat` holds, which keeps its bits; zero outside `where`."""
        common, old = flat.values.clone(), memory["previous_model"].to(flat.values.device)
        gap = torch.where(where, old[: flat.trained] - common[: flat.trained], 0.0)
        keep = memory.get("keep", torch.zeros(flat.trained)).to(gap)
        picked = rows[torch.randperm(len(rows), generator=stream)[: max(1, round(self.share * len(rows)))]]
        loss = cross_entropy().begin(LossContext(network, examples.labels[rows], network.classes))
        for _ in range(1 if "keep" in memory else self.first_passes):
            for part in picked.split(64):
                start = common.clone()
                start[: flat.trained] += keep * gap
                flat.load(start)
                network.eval()
                inputs, labels = onto(examples.batch(part), gap.device), onto(examples.labels[part], gap.device)
                loss(network, inputs, labels, examples.entry).backward()
                keep = (keep - self.rate * flat.gradient() * gap).clamp(0, 1)
        flat.load(common)
        return keep.cpu()
