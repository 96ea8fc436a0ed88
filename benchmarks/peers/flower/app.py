"""The ClientApp, in a module of its own so that Ray's workers import it once and keep the data in memory."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from protocol import Workload, read
from torch import nn
from torch_task import Task, build, masks, moving

app = ClientApp()


@lru_cache(1)
def work() -> tuple[Workload, Task, nn.Module]:
    """The data and a network, once per process."""
    workload, arrays = read(Path(os.environ["PEER_FOLDER"]))
    task, model = Task(workload, arrays), build(workload, arrays)
    task.masks = masks(model, workload)
    return workload, task, model


@app.train()
def train(message: Message, context: Context) -> Message:
    """J local steps from the arrays of the message."""
    torch.set_num_threads(1)  # one CPU per client, as its resources say
    _, task, model = work()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    client = int(context.node_config["partition-id"])
    steps = task.train(model, client, int(message.content["config"]["server-round"]))
    arrays = ArrayRecord({name: p.data for name, p in moving(model).items()})
    metrics = MetricRecord({"num-examples": len(task.rows[client]), "steps": steps})
    return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)
