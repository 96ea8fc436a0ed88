"""The real job as users of other tools write it: `python job.py loop|flower|pfl KIND FOLDER`; needs no fedgraft.

A `transformers` image classifier (with peft for LoRA) is trained by FedAvg: images go through the whole network in
every step. `loop` is a plain loop; `flower` the same client in Flower's simulation; `pfl` pfl-research's simulated
backend. FOLDER holds job.npz (images and labels), job.json (the sizes) and the model; the result is put beside them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def network(kind: str, job: dict[str, Any]) -> nn.Module:
    """The classifier of which this kind trains a part."""
    from transformers import ViTForImageClassification

    torch.manual_seed(0)
    made: Any = ViTForImageClassification.from_pretrained(
        job["model"], num_labels=job["classes"], ignore_mismatched_sizes=True
    )
    if kind == "LoRA":
        from peft import LoraConfig, get_peft_model

        blocks = list(range(job["blocks"], job["depth"]))
        chosen = {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": blocks}
        return get_peft_model(made, LoraConfig(r=8, lora_alpha=16, modules_to_save=["classifier"], **chosen))
    depth = job["blocks"]
    for name, parameter in made.named_parameters():
        number = next((int(part) for part in name.split(".") if part.isdigit()), -1)
        parameter.requires_grad = "classifier" in name or (kind != "head" and number >= depth)
    return made


def loss_of(model: nn.Module, images: Tensor, labels: Tensor, job: dict[str, Any]) -> Tensor:
    """The loss of a batch of stored images (B, side, side, 3), enlarged and scaled as the network wants them."""
    pixels = nn.functional.interpolate(
        images.permute(0, 3, 1, 2).float() / 255, size=job["size"], mode="bilinear", antialias=True
    )
    return nn.functional.cross_entropy(model(pixel_values=(pixels - 0.5) / 0.5).logits, labels)


def train(model: nn.Module, images: Tensor, labels: Tensor, job: dict[str, Any], masks: dict[str, Tensor]) -> None:
    """The local steps of one client."""
    moving = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(moving, lr=0.01, momentum=0.9)
    draw = torch.randperm(len(images))
    model.train()
    for step in range(job["steps"]):
        rows = draw[(torch.arange(job["batch"]) + step * job["batch"]) % len(draw)]
        optimizer.zero_grad()
        loss_of(model, images[rows], labels[rows], job).backward()
        for name, parameter in model.named_parameters():
            if name in masks and parameter.grad is not None:
                parameter.grad.mul_(masks[name])
        optimizer.step()


def masks_of(model: nn.Module, kind: str) -> dict[str, Tensor]:
    """A random tenth of the weights of the blocks that train, by masked gradients, as users do it."""
    if kind != "sparse 90 %":
        return {}
    named = ((n, p) for n, p in model.named_parameters() if p.requires_grad and "classifier" not in n)
    return {name: (torch.rand(p.shape) < 0.1).float() for name, p in named}


def loop(kind: str, job: dict[str, Any], images: Tensor, labels: Tensor) -> list[float]:
    """Seconds of each round."""
    model, found = network(kind, job), []
    masks = masks_of(model, kind)
    common = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    for _ in range(job["rounds"]):
        began, total = time.perf_counter(), {n: torch.zeros_like(v) for n, v in common.items()}
        for k in range(job["cohort"]):
            model.load_state_dict(common, strict=False)
            part = slice(k * job["each"], (k + 1) * job["each"])
            train(model, images[part], labels[part], job, masks)
            for n, p in model.named_parameters():
                if p.requires_grad:
                    total[n] += p.detach() / job["cohort"]
        common = total
        found.append(time.perf_counter() - began)
    return found


def flower(kind: str, job: dict[str, Any], images: Tensor, labels: Tensor) -> list[float]:
    """Seconds of each round of Flower's simulation, one client on each core."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    app, server, times = ClientApp(), ServerApp(), []

    @app.train()
    def fit(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        model, arrays = network(kind, job), message.content["arrays"]
        model.load_state_dict(arrays.to_torch_state_dict(), strict=False)  # type: ignore[union-attr]
        k = int(context.node_config["partition-id"]) % job["cohort"]
        part = slice(k * job["each"], (k + 1) * job["each"])
        train(model, images[part], labels[part], job, masks_of(model, kind))
        moved = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        metrics = MetricRecord({"num-examples": job["each"]})
        return Message(RecordDict({"arrays": ArrayRecord(moved), "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        def after(number: int, arrays: ArrayRecord) -> None:
            times.append(time.perf_counter())

        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=job["cohort"], min_available_nodes=job["cohort"])
        start = {n: p.detach() for n, p in network(kind, job).named_parameters() if p.requires_grad}
        strategy.start(grid, ArrayRecord(start), num_rounds=job["rounds"], evaluate_fn=after)

    resources = {"init_args": {"num_cpus": job["cores"]}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app, num_supernodes=job["cohort"], backend_config=resources)
    return [b - a for a, b in pairwise(times)]


def pfl(kind: str, job: dict[str, Any], images: Tensor, labels: Tensor) -> list[float]:
    """Seconds of each round of pfl-research: one process, as many threads as there are cores."""
    from functools import partial

    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    times: list[float] = []

    class Classifier(nn.Module):
        """The network with the methods that pfl asks for; nothing is evaluated here."""

        def __init__(self) -> None:
            super().__init__()
            self.model = network(kind, job)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            self.train()
            return loss_of(self.model, x, y, job)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class Watch(TrainingProcessCallback):
        """The clock."""

        def on_train_begin(self, *, model: Any) -> Metrics:
            times.append(time.perf_counter())
            return Metrics()

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            times.append(time.perf_counter())
            return False, Metrics()

    def user(k: int) -> PyTorchTensorDataset:
        rows = k * job["each"] + torch.randperm(job["each"])[: job["steps"] * job["batch"]]
        return PyTorchTensorDataset((images[rows], labels[rows]), user_id=str(k))

    classifier = Classifier()
    moving = {n: p for n, p in classifier.model.named_parameters() if p.requires_grad}
    for name, mask in masks_of(classifier.model, kind).items():
        moving[name].register_hook(mask.mul)
    data = FederatedDataset(user, get_user_sampler("random", list(range(job["cohort"]))))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job["rounds"],
            evaluation_frequency=job["rounds"] + 1,
            train_cohort_size=job["cohort"],
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=PyTorchModel(
            classifier,
            local_optimizer_create=partial(torch.optim.SGD, momentum=0.9),
            central_optimizer=torch.optim.SGD(moving.values(), 1.0),
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.01, local_batch_size=job["batch"]
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=512),
        callbacks=[Watch()],
    )
    return [b - a for a, b in pairwise(times)]


def main() -> None:
    """Run one peer and write its seconds."""
    peer, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    os.environ |= {"HF_HUB_OFFLINE": "1", "FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(job["cores"])
    with np.load(folder / "job.npz") as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    seconds = {"loop": loop, "flower": flower, "pfl": pfl}[peer](kind, job, images, labels)
    sent = sum(p.numel() for p in network(kind, job).parameters() if p.requires_grad)
    (folder / f"{peer}.json").write_text(json.dumps({"seconds": seconds, "bytes_up": 4 * sent}))


if __name__ == "__main__":
    main()
