"""FedJAX: its federated averaging, one jitted step, clients of a round one after another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from protocol import Clock, Workload, given_folder, read


def network(workload: Workload) -> Any:
    """The forward pass as a haiku function."""

    def forward(batch: dict[str, Any]) -> Any:
        x = batch["x"]
        if workload.task == "cnn":
            mean, std = jnp.array(workload.mean), jnp.array(workload.std)
            x = (x.astype(jnp.float32) / 255 - mean) / std  # (B, H, W, 3)
            for channels in (workload.options["width"], 2 * workload.options["width"]):
                x = jax.nn.relu(hk.Conv2D(channels, 3)(x))
                x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = hk.Flatten()(x)
        return hk.Linear(workload.classes)(x)

    return hk.transform(forward)


def start(workload: Workload, arrays: dict[str, np.ndarray], params: Any) -> Any:
    """The common starting weights, in JAX's order of axes."""
    found = [arrays[f"start_{i}"] for i in range(sum(name.startswith("start_") for name in arrays))]
    if workload.task == "cnn":
        side, channels = workload.image_size // 4, 2 * workload.options["width"]
        head = found[4].reshape(-1, channels, side, side).transpose(0, 2, 3, 1)
        found = [found[0].transpose(2, 3, 1, 0), found[1], found[2].transpose(2, 3, 1, 0), found[3], head, found[5]]
        found[4] = head.reshape(len(head), -1)
    found[-2] = found[-2].T
    names = list(params)
    for context, name in enumerate(names):
        assert params[name]["w"].shape == found[2 * context].shape, (name, found[2 * context].shape)
    return {name: {"w": jnp.asarray(found[2 * i]), "b": jnp.asarray(found[2 * i + 1])} for i, name in enumerate(names)}


def main() -> None:
    folder = given_folder()
    workload, arrays = read(folder)
    transformed = network(workload)
    data = fedjax.InMemoryFederatedData(
        {
            f"{client:05d}": {"x": arrays["train_x"][rows], "y": arrays["train_y"][rows]}
            for client, rows in enumerate(arrays["rows"])
        }
    )
    sample = {"x": arrays["train_x"][:2], "y": arrays["train_y"][:2]}
    model = fedjax.create_model_from_haiku(
        transformed,
        sample,
        train_loss=lambda batch, out: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], out),
        eval_metrics={"accuracy": fedjax.metrics.Accuracy()},
    )
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(workload.lr, workload.momentum),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch_size, num_epochs=None, num_steps=workload.steps),
    )
    held = {
        part: list(
            fedjax.ClientDataset({"x": arrays[f"{part}_x"], "y": arrays[f"{part}_y"]}).padded_batch(batch_size=512)
        )
        for part in ("validation", "test")
    }
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, workload.per_round, workload.seed)
    state = algorithm.init(start(workload, arrays, model.init(jax.random.PRNGKey(workload.seed))))
    clock = Clock(workload)
    clock.start()
    for _ in range(workload.rounds):
        state, _ = algorithm.apply(state, sampler.sample())
        jax.block_until_ready(state.params)
        clock.steps += workload.per_round * workload.steps
        if workload.evaluates(clock.round_done()):
            clock.evaluated(float(fedjax.evaluate_model(model, state.params, held["validation"])["accuracy"]))
    test = float(fedjax.evaluate_model(model, state.params, held["test"])["accuracy"])
    clock.write(folder, "fedjax", ("fedjax", "jax", "jaxlib", "dm-haiku"), test)


if __name__ == "__main__":
    main()
