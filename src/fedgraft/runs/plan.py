"""The plan of a run before it starts: what will move, how many steps, how many bytes."""

from __future__ import annotations

from fedgraft import server
from fedgraft.runs.setup import Setup, per_round
from fedgraft.runs.warnings import warnings_for
from fedgraft.config.load import Config, validate
from fedgraft.report.display import size
from fedgraft.runs.reporting import describe
from fedgraft.messages import Payload, Reply, wire_size


def plan(config: Config) -> list[str]:
    """Lines for `--dry-run`. Bytes are exact for one message; totals assume that everyone answers."""
    wanted = config
    if config.trainable.kind == "sparse":  # any mask of the right size will do: the plan must not wait for calibration
        table = config.model_dump(mode="json", exclude_none=True)
        table["trainable"]["mask"] |= {"strategy": "random", "per_client": False, "merge": "score_mean"}
        config = validate(table)
    setup = Setup(config)
    setup.open()
    state = server.start(setup.algorithm, setup.space.gather(setup.network), setup.space.trained)
    cohort = server.sample(setup.federation, 0)
    orders = server.orders(setup.algorithm, setup.federation, state, cohort, setup.space.digest)
    layout = setup.algorithm.sends.layout(setup.space.size)
    import torch

    arrays = {name: torch.empty(count, dtype=dtype, device="meta") for name, (dtype, count) in layout.items()}
    reply = Reply(
        config.digest, 0, 0, setup.space.digest, 1, Payload(setup.algorithm.sends.name, setup.space.size, arrays)
    )
    down, up = wire_size(orders[0]), wire_size(reply)
    m, total = per_round(config), config.rounds.total
    sizes = setup.federated.partition.sizes()
    steps = sum(setup.algorithm.local.steps(int(n)) for n in sizes) / len(sizes)
    return [
        describe(setup),
        f"data: {config.data.source}, {len(setup.federated.train_rows):,} training, {len(setup.federated.validation_rows):,} "
        f"validation, {len(setup.federated.dataset.test.labels):,} test images; "
        f"clients hold {int(min(sizes))} to {int(max(sizes))}",
        f"local work: {steps:.1f} steps of {setup.algorithm.local.batch_size} images a client and round, "
        f"{steps * m * total:,.0f} steps in all",
        f"bytes: {size(down)} down and {size(up)} up per client and round; {size(down * m * total)} down and "
        f"{size(up * m * total)} up in all",
        *(f"warning: {text}" for text in warnings_for(wanted, setup)),
    ]
