"""pfl-research: FederatedAveraging on the simulated backend, with user datasets drawn when a user is sampled."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from protocol import Clock, given_folder, read
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_task import Task, build, masks, moving


class Classifier(nn.Module):
    """The network with the two methods that pfl asks for."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.model(self.task.inputs(x)), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        self.eval()
        right = (self.model(self.task.inputs(x)).argmax(1) == y).sum().item()
        return {"accuracy": Weighted(right, len(y))}


class Watch(TrainingProcessCallback):
    """Central evaluation when it is due, and the clock."""

    def __init__(self, clock: Clock, task: Task) -> None:
        self.clock, self.task = clock, task

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.clock.start()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        workload = self.clock.workload
        self.clock.steps += workload.per_round * workload.steps
        if workload.evaluates(self.clock.round_done()):
            self.clock.evaluated(self.task.accuracy(model.pytorch_model.model, "validation"))
        return False, Metrics()


def main() -> None:
    folder = given_folder()
    workload, arrays = read(folder)
    np.random.seed(workload.seed)
    torch.manual_seed(workload.seed)
    task, network = Task(workload, arrays), build(workload, arrays)
    chosen = moving(network)
    for name, mask in masks(network, workload).items():
        chosen[name].register_hook(mask.mul)
    draws = np.random.RandomState(workload.seed)

    def user(name: int) -> PyTorchTensorDataset:
        """One round's images of a user: J batches of its reshuffled rows."""
        rows, wanted = task.rows[name].numpy(), workload.steps * workload.batch_size
        picked = np.concatenate([draws.permutation(rows) for _ in range(-(-wanted // len(rows)))])[:wanted]
        return PyTorchTensorDataset((task.x[picked], task.y[picked]), user_id=str(name))

    data = FederatedDataset(user, get_user_sampler("random", list(range(workload.clients))))
    classifier = Classifier(network, task)
    model = PyTorchModel(
        classifier,
        local_optimizer_create=partial(torch.optim.SGD, momentum=workload.momentum),
        central_optimizer=torch.optim.SGD(chosen.values(), 1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=workload.rounds,
            evaluation_frequency=workload.rounds + 1,
            train_cohort_size=workload.per_round,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=workload.lr, local_batch_size=workload.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=512),
        callbacks=[watch := Watch(Clock(workload), task)],
    )
    test = task.accuracy(network, "test")
    watch.clock.write(folder, "pfl", ("pfl", "torch", "transformers", "peft"), test)


if __name__ == "__main__":
    main()
