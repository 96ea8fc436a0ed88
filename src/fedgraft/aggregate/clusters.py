"""Clustered federated learning: several common models, one per cluster of clients (IFCA, Ghosh et al. 2020).

The clusters are not known beforehand. Every request carries all models, as offsets from their mean. A client takes the
model with the least loss on its own training images, trains it, and reports which one it was; the server averages
within clusters. All models start at the same pretrained weights, so in the first round each client draws its cluster.
One cluster is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedgraft.aggregate.mean import weighted_mean
from fedgraft.aggregate.slots import Advanced, Aggregator, Answers, Observe, Step
from fedgraft.core.capabilities import Capabilities, Capability
from fedgraft.core.state import ServerState


@dataclass(frozen=True)
class Clusters:
    """Aggregation into `count` common models; clients choose their cluster anew in every round."""

    count: int = 2
    wants: tuple[Observe, ...] = ()
    instead: ClassVar[str] = Aggregator.instead
    requires: ClassVar[Capabilities] = frozenset(
        {
            Capability.EACH_UPDATE,
            Capability.CLIENT_NUMBERS,
            Capability.FIXED_COORDINATES,
            Capability.AVERAGED_UPDATES,
            Capability.SEPARATE_CLIENTS,
        }
    )
    provides: ClassVar[Capabilities] = frozenset({Capability.EXCHANGE})

    @property
    def name(self) -> str:
        """`clusters:` and their number."""
        return f"clusters:{self.count}"

    @property
    def reports(self) -> Mapping[str, float]:
        """The scalar that comes with every update, the index of the client's cluster, and its largest value."""
        return {"cluster": float(self.count - 1)}

    def request_tensors(self, state: ServerState) -> Mapping[str, Tensor]:
        """Return the tensors of a request: all models as offsets from its own, (clusters, k); none while equal."""
        if "clusters" not in state.rule:
            return {}
        return {"clusters": state.rule["clusters"]}

    def advance(self, step: Step, answers: Answers, weights: Tensor) -> Advanced:
        """Return the state after moving each cluster's model by the mean of its clients' updates.

        The common vector (`anchor`) follows the mean of all models; clusters are stored as offsets from it under
        `rule["clusters"]`. A cluster that no client chose keeps its model.
        """
        state = step.state
        info = step.info(answers, weights)
        offsets = state.rule.get("clusters", torch.zeros(self.count, len(state.vector)))
        chosen = []
        moved_models = []  # relative to the common vector
        for scalars, update in zip(answers.scalars, answers.updates, strict=True):
            cluster = min(max(round(scalars["cluster"]), 0), self.count - 1)
            chosen.append(cluster)
            moved_models.append(offsets[cluster] + update)
        mean_update = weighted_mean(moved_models, weights)
        anchor, _ = step.rule.step(state.vector, mean_update, {}, info)
        new_offsets = torch.empty_like(offsets)
        for cluster in range(self.count):
            members = [i for i, choice in enumerate(chosen) if choice == cluster]
            model = state.vector + offsets[cluster]
            if members:
                update = weighted_mean([answers.updates[i] for i in members], weights[members])
                model, _ = step.rule.step(model, update, {}, info)
            torch.sub(model, anchor, out=new_offsets[cluster])
        rule = {**state.rule, "clusters": new_offsets}
        new_state = replace(state, round=state.round + 1, vector=anchor, rule=rule)
        return Advanced(new_state, mean_update, {"clusters": torch.tensor(chosen)})
