# ruff: noqa: E402
"""Flower's simulation: ServerApp with the FedAvg strategy, ClientApps on Ray, one CPU each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE.parent / "shared"), str(HERE)]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)  # for Ray's workers
os.environ["PEER_FOLDER"] = str(Path(sys.argv[1]).resolve())

import app
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from protocol import Clock, given_folder

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    workload, task, model = app.work()
    clock = Clock(workload)

    def after_round(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number == 0:
            clock.start()
            return None
        clock.steps += workload.per_round * workload.steps
        if not workload.evaluates(clock.round_done()):
            return None
        model.load_state_dict(arrays.to_torch_state_dict(), strict=False)
        clock.evaluated(task.accuracy(model, "validation"))
        return MetricRecord({"accuracy": clock.evaluations[-1][1]})

    strategy = FedAvg(
        fraction_train=workload.per_round / workload.clients,
        fraction_evaluate=0.0,
        min_train_nodes=workload.per_round,
        min_available_nodes=workload.clients,
    )
    start = ArrayRecord({name: p.data for name, p in app.moving(model).items()})
    strategy.start(grid, start, num_rounds=workload.rounds, evaluate_fn=after_round)
    test = task.accuracy(model, "test")
    clock.write(given_folder(), "flower", ("flwr", "ray", "torch", "transformers", "peft"), test)


if __name__ == "__main__":
    overrides, _, _ = app.work()
    resources = {"init_args": {"num_cpus": overrides.cores}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, app.app, num_supernodes=overrides.clients, backend_config=resources)
