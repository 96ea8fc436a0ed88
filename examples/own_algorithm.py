"""An algorithm of your own: a weighting and a server rule written here, put into FedAvg's slots with `vary`.

The weighting counts a client by the square root of its examples, so that large clients dominate less. The server rule
moves only a part of the way at first and all of it later. Nothing else of the federation has to know.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fedgraft
from fedgraft.aggregate.server_rules import State

OVERRIDES = ["partition.kind=dirichlet", "partition.clients=6", "partition.alpha=0.3"]


def by_root() -> fedgraft.Weighting:
    """Weights in proportion to the square root of the examples; they need not sum to one.

    `own` is the same rule as a client can apply it to itself, so that secure aggregation can carry the weight.
    """

    def weights(answers: fedgraft.Answers) -> Tensor:
        return answers.examples.sqrt()

    return fedgraft.Weighting("root", weights, own=lambda share, scalars: share**0.5)


def rising(first: float, rounds: int) -> fedgraft.ServerRule:
    """A step that grows from `first` of the mean update to all of it over so many rounds."""

    def init(size: int) -> State:
        return {"done": torch.zeros(1)}

    def step(vector: Tensor, update: Tensor, state: State, info: fedgraft.RoundInfo) -> tuple[Tensor, State]:
        share = min(1.0, first + (1 - first) * float(state["done"]) / rounds)
        return vector + share * update, {"done": state["done"] + 1}

    return fedgraft.ServerRule("rising", init, step)


def run(ours: bool, rounds: int = 3) -> fedgraft.Result:
    """Some rounds of plain FedAvg, or with the two parts of ours. The data and the network come from a config."""
    task = fedgraft.job_of(fedgraft.load_config(overrides=OVERRIDES)).task
    local = fedgraft.LocalTraining(steps=4, lr=0.002, clip=1.0)
    algorithm = fedgraft.fedavg(trainable=fedgraft.last_blocks(1), local=local)
    if ours:
        algorithm = fedgraft.vary(algorithm, name="ours", weighting=by_root(), server=rising(0.5, rounds))
    return fedgraft.run(algorithm, task.network, task.data, rounds)


def main() -> None:
    """The same federation twice, then a combination that is refused when it is built."""
    for name, ours in (("fedavg", False), ("ours", True)):
        print(f"{name:8} test accuracy {100 * run(ours).accuracy:.1f} %")
    try:
        fedgraft.vary(fedgraft.named("local_only"), server=rising(0.5, 4))
    except fedgraft.FedgraftError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
