# ruff: noqa: E402
"""FedLab: its standalone pipeline, a serial trainer and the synchronous FedAvg handler."""

from __future__ import annotations

import random
import sys
from copy import deepcopy
from pathlib import Path
from unittest.mock import MagicMock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import torch

# FedLab imports torchvision for its MNIST and CIFAR downloads, which nothing here uses and which does not load beside
# the CPU build of torch: an empty name stands in for it while FedLab is imported.
ABSENT = ("torchvision", "torchvision.datasets", "torchvision.transforms")
sys.modules.update({name: MagicMock() for name in ABSENT})
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from fedlab.utils.serialization import SerializationTool

for name in ABSENT:
    del sys.modules[name]
from protocol import Clock, given_folder, read
from torch import Tensor, nn
from torch_task import Task, build


class Trainer(SGDSerialClientTrainer):
    """J steps instead of epochs."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__(model, task.workload.clients)
        self.task, self.round, self.steps = task, 0, 0

    def local_process(self, payload: list[Tensor], id_list: list[int]) -> None:
        for client in id_list:
            SerializationTool.deserialize_model(self._model, payload[0])
            self.steps += self.task.train(self._model, client, self.round)
            self.cache.append([self.model_parameters])
        self.round += 1


class Pipeline(StandalonePipeline):
    """The pipeline with the clock and the evaluation."""

    def __init__(self, handler: SyncServerHandler, trainer: Trainer, clock: Clock) -> None:
        super().__init__(handler, trainer)
        self.clock = clock

    def evaluate(self) -> None:
        if self.clock.workload.evaluates(self.clock.round_done()):
            self.clock.evaluated(self.trainer.task.accuracy(self.handler.model, "validation"))


def main() -> None:
    folder = given_folder()
    workload, arrays = read(folder)
    random.seed(workload.seed)
    torch.manual_seed(workload.seed)
    task, model = Task(workload, arrays), build(workload, arrays)
    handler = SyncServerHandler(model, workload.rounds, workload.per_round / workload.clients)
    trainer = Trainer(deepcopy(model), task)
    clock = Clock(workload)
    clock.start()
    Pipeline(handler, trainer, clock).main()
    clock.steps = trainer.steps
    clock.write(folder, "fedlab", ("fedlab", "torch", "transformers"), task.accuracy(handler.model, "test"))


if __name__ == "__main__":
    main()
