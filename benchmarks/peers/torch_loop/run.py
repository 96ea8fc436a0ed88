"""FedAvg as a plain PyTorch loop: one network, state dicts, a mean."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import torch
from protocol import Clock, given_folder, read
from torch_task import Task, build, masks, moving


def main() -> None:
    folder = given_folder()
    workload, arrays = read(folder)
    torch.manual_seed(workload.seed)
    draw = torch.Generator().manual_seed(workload.seed)
    task, model = Task(workload, arrays), build(workload, arrays)
    task.masks = masks(model, workload)
    common = copy.deepcopy({name: p.data for name, p in moving(model).items()})
    clock = Clock(workload)
    clock.start()
    for number in range(workload.rounds):
        cohort = torch.randperm(workload.clients, generator=draw)[: workload.per_round].tolist()
        found = []
        for client in cohort:
            model.load_state_dict(common, strict=False)
            clock.steps += task.train(model, client, number)
            found.append((len(task.rows[client]), {name: p.data.clone() for name, p in moving(model).items()}))
        total = sum(count for count, _ in found)
        common = {name: sum(count / total * state[name] for count, state in found) for name in common}
        if workload.evaluates(clock.round_done()):
            model.load_state_dict(common, strict=False)
            clock.evaluated(task.accuracy(model, "validation"))
    test = task.accuracy(model, "test")
    clock.write(folder, "torch_loop", ("torch", "transformers", "peft"), test)


if __name__ == "__main__":
    main()
