"""An algorithm of your own: a weigher and a server rule written here, put into FedAvg's slots with `vary`.

The weigher counts a client by the square root of its examples, so that large clients dominate less. The server rule
moves only a part of the way at first and all of it later. Nothing else of the federation has to know.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fedgraft
from fedgraft.aggregate.server_rules import State

OVERRIDES = [
    "partition.kind=dirichlet",
    "partition.clients=6",
    "partition.alpha=0.3",
    "trainable.kind=last_blocks",
    "trainable.blocks=1",
    "local.lr=0.002",
    "local.clip=1.0",
]


def by_root() -> fedgraft.Weighting:
    """Weights in proportion to the square root of the examples; they need not sum to one.

    `own` is the same rule as a client can apply it to itself, so that a secure sum can carry the weight.
    """

    def weights(answers: fedgraft.Answers) -> Tensor:
        return answers.examples.sqrt()

    return fedgraft.Weighting("root", weights, own=lambda share, scalars: share**0.5)


def rising(first: float, rounds: int) -> fedgraft.ServerRule:
    """A step that grows from `first` of the mean change to all of it over so many rounds."""

    def init(size: int) -> State:
        return {"done": torch.zeros(1)}

    def step(vector: Tensor, update: Tensor, state: State, info: fedgraft.RoundInfo) -> tuple[Tensor, State]:
        share = min(1.0, first + (1 - first) * float(state["done"]) / rounds)
        return vector + share * update, {"done": state["done"] + 1}

    return fedgraft.ServerRule("rising", init, step)


def run(ours: bool, rounds: int = 3) -> float:
    """Validation accuracy after some rounds of plain FedAvg, or with the two parts of ours."""
    setup = fedgraft.Setup(fedgraft.load_config(overrides=[*OVERRIDES, f"rounds.total={rounds}"]))
    if ours:
        setup.algorithm = fedgraft.vary(setup.algorithm, name="ours", weighting=by_root(), server=rising(0.5, rounds))
    with fedgraft.one_thread():
        fedgraft.install_head(setup)
        setup.open()
        state = fedgraft.start(setup.algorithm, setup.space.gather(setup.network), setup.space.trained)
        engine = setup.engine()
        for _ in range(rounds):
            state, _ = fedgraft.run_round(setup.algorithm, setup.federation, state, engine, setup.server_context)
    setup.space.scatter(state.vector, setup.network)
    return fedgraft.evaluate(setup.network, setup.train_images, setup.federated.validation_rows).accuracy


def main() -> None:
    """The same federation twice, then a combination that is refused when it is built."""
    for name, ours in (("fedavg", False), ("ours", True)):
        print(f"{name:8} validation accuracy {100 * run(ours):.1f} %")
    try:
        fedgraft.vary(fedgraft.named("local_only"), server=rising(0.5, 4))
    except fedgraft.FedgraftError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
