"""One round of federated averaging, step by step: clients adapt the embedded ViT to handwritten digits."""

from __future__ import annotations

import fedgraft

OVERRIDES = [
    "partition.clients=4",
    "trainable.kind=last_blocks",
    "trainable.blocks=1",
    "local.lr=0.002",
    "local.clip=1.0",
]


def main() -> None:
    """Build the parts from a config, make a head from the clients' sums, then run one round by hand."""
    setup = fedgraft.Setup(fedgraft.load_config(overrides=OVERRIDES))
    with fedgraft.one_thread():  # the number of threads changes the last bits of a sum
        fedgraft.install_head(setup)  # step 0: clients send sums, never images
        setup.open()  # the coordinates that may move, as one flat vector
        state = fedgraft.start(setup.algorithm, setup.space.gather(setup.network), setup.space.trained)
        state, summary = fedgraft.run_round(
            setup.algorithm, setup.federation, state, setup.engine(), setup.server_context
        )
    setup.space.scatter(state.vector, setup.network)
    result = fedgraft.evaluate(setup.network, setup.train_images, setup.federated.validation_rows)
    print(f"clients {summary.cohort}: {summary.record['bytes_up']:,} bytes up, {summary.record['bytes_down']:,} down")
    print(f"{setup.space.trained:,} coordinates moved by {summary.record['update_norm']:.4f} in all")
    print(f"validation accuracy after round {state.round}: {100 * result.accuracy:.1f} %")


if __name__ == "__main__":
    main()
