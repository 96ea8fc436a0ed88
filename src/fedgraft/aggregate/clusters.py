"""Several common models, one for each cluster of clients that nobody knows beforehand (IFCA, Ghosh et al. 2020).

Every order carries all models, as offsets from the mean one. A client takes the one with the least loss on its own
training images, trains it, and says which it was; the server averages within clusters. All models start at the same
pretrained weights, so in the first round each client draws its cluster. One cluster is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgraft.aggregate.mean import weighted_mean
from fedgraft.aggregate.slots import Advanced, Aggregator, Answers, Observe, Step
from fedgraft.core.state import ServerState


@dataclass(frozen=True)
class Clusters:
    """So many common models; clients choose theirs anew in every round."""

    count: int = 2
    linear = False
    is_mean = False
    of_trainable = False
    personal = False
    several = True
    shares = True
    instead = Aggregator.instead
    wants: tuple[Observe, ...] = ()

    @property
    def name(self) -> str:
        """What it is called."""
        return f"clusters:{self.count}"

    @property
    def reports(self) -> Mapping[str, float]:
        """The number of the cluster comes with every update."""
        return {"cluster": float(self.count - 1)}

    def gives(self, state: ServerState) -> Mapping[str, Tensor]:
        """All models, as offsets from the order's, (clusters, k); nothing while they are still equal."""
        return {"clusters": state.rule["clusters"]} if "clusters" in state.rule else {}

    def advance(self, step: Step, answers: Answers, weights: Tensor) -> Advanced:
        """Each cluster's model moves by the mean of its clients' updates; the common vector is the mean of all."""
        state, info = step.state, step.info(answers, weights)
        offsets = state.rule.get("clusters", torch.zeros(self.count, len(state.vector)))
        told = [min(max(round(s["cluster"]), 0), self.count - 1) for s in answers.scalars]
        whole = weighted_mean([offsets[c] + u for c, u in zip(told, answers.updates, strict=True)], weights)
        anchor, _ = step.rule.step(state.vector, whole, {}, info)
        moved = torch.empty_like(offsets)
        for c in range(self.count):
            mine = [i for i, cluster in enumerate(told) if cluster == c]
            model = state.vector + offsets[c]
            if mine:
                update = weighted_mean([answers.updates[i] for i in mine], weights[mine])
                model, _ = step.rule.step(model, update, {}, info)
            torch.sub(model, anchor, out=moved[c])
        rule = {**state.rule, "clusters": moved}
        new = replace(state, round=state.round + 1, vector=anchor, rule=rule)
        return Advanced(new, whole, {"clusters": torch.tensor(told)})
