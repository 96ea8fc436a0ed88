"""FedALA (Zhang et al. 2023): a client starts between its last model and the common one, coordinate by coordinate.

start = common + keep * (last - common), keep in [0, 1] and learned by gradient steps on the client's own images. The
paper writes 1 - keep; this way a keep of zero is the common model bit for bit, so a rate of zero is FedAvg.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgraft.core.device import Device, fetch
from fedgraft.core.label_sets import mean_loss
from fedgraft.core.protocols import Examples, Network
from fedgraft.local.train import Flat


@dataclass(frozen=True)
class AdaptiveStart:
    """FedALA's rule for a client's start; an algorithm holds it in its slot `client_state`.

    `rate` is the step size, `share` the fraction of the client's images on which the weights are learned.
    """

    rate: float = 1.0
    share: float = 0.8
    blocks: int = 1
    """The last `blocks` blocks and the head are blended; the layers before them are the common model's."""
    first_passes: int = 5
    """Passes over the images when a client learns its weights for the first time; later it is one. The paper continues
    until the loss no longer changes."""

    def blend(self, common: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        """Return the model between the common one and the client's last; the common one in a client's first round."""
        if "keep" not in memory:
            return common
        keep = memory["keep"]
        trained = len(keep)
        start = common.clone()
        start[:trained] += keep * (memory["previous_model"][:trained] - common[:trained])
        return start

    def learn(
        self,
        network: Network,
        flat: Flat,
        learnable: Tensor,
        examples: Examples,
        rows: Tensor,
        memory: Mapping[str, Tensor],
        stream: torch.Generator,
    ) -> Tensor:
        """Return the weights `keep` (trained,), in [0, 1], that the client's images prefer; zero unless `learnable`.

        Args:
            flat: the bound network with the common model, which is restored at the end.
            learnable: bool (trained,).
            rows: the client's training rows.
            memory: the client's, with `previous_model`, its last model, and `keep`, the weights learned before.
            stream: draws the images.
        """
        common = flat.values.clone()
        device = Device(flat.values.device)
        last = device.put(memory["previous_model"])
        gap = torch.where(learnable, last[: flat.trained] - common[: flat.trained], 0.0)
        keep = device.put(memory.get("keep", torch.zeros(flat.trained)))
        count = max(1, round(self.share * len(rows)))
        sample = rows[torch.randperm(len(rows), generator=stream)[:count]]
        passes = self.first_passes
        if "keep" in memory:
            passes = 1
        for _ in range(passes):
            for batch in sample.split(64):
                start = common.clone()
                start[: flat.trained] += keep * gap
                flat.load(start)
                network.eval()
                inputs = device.put(examples.batch(batch))
                labels = device.put(examples.labels[batch])
                mean_loss(network(inputs, examples.entry), labels).backward()
                keep = (keep - self.rate * flat.gradient() * gap).clamp(0, 1)
        flat.load(common)
        return fetch(keep)
