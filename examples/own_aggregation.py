"""An aggregation of your own: the mean of the updates, each shortened to the length that the median client went."""

import torch

import fedgraft as fg


def shortened(answers, weights):
    """One update from those of the clients (m vectors) and their weights (m,)."""
    updates = torch.stack(list(answers.updates))
    norms = updates.norm(dim=1)
    updates = updates * (norms.median() / norms.clamp(min=1e-12)).clamp(max=1.0)[:, None]
    return (weights / weights.sum()).to(updates) @ updates


ours = fg.vary(
    fg.fedavg(trainable=fg.head(), local=fg.LocalTraining(steps=4, lr=0.05)),
    name="shortened",
    aggregate=fg.Aggregator("shortened", shortened),  # it needs each update: no secure sum can carry it
    weighting=fg.Weighting("root", lambda answers: answers.examples.sqrt()),  # large clients dominate less
)
clients = fg.partition.dirichlet(fg.data.digits(), clients=6, alpha=0.3)
print(fg.run(ours, fg.model("nano"), clients, rounds=3))
try:
    fg.secure(ours)
except fg.FedgraftError as error:
    print(f"refused: {error}")
