"""One round of federated averaging, step by step: clients adapt the embedded ViT to handwritten digits."""

import fedgraft

OVERRIDES = ["partition.clients=4", "trainable.kind=last_blocks", "trainable.blocks=1", "local.lr=0.002"]


def main() -> None:
    """Build the objects that a config names, make a head from the clients' sums, then run one round by hand."""
    setup = fedgraft.setup_of(fedgraft.load_config(overrides=OVERRIDES))
    engines, task = fedgraft.Engines(setup), setup.task
    rows = task.data.validation_rows
    with fedgraft.one_thread():  # the number of threads changes the last bits of a sum
        fedgraft.install_head(setup, engines)  # head initialisation: clients send sums, never images
        before = fedgraft.evaluate(task.network, task.eval_images, rows)
        run = fedgraft.open_run(setup, engines)  # the coordinates that may move, as one flat vector
        engine = engines.training(setup.algorithm, run.context)
        state = fedgraft.start(setup.algorithm, run.space.gather(task.network), run.space.trained)
        state, summary = fedgraft.run_round(setup.algorithm, setup.federation, state, engine, run.server_context)
        engines.close()
    run.context.load_model(state.vector)
    result = fedgraft.evaluate(task.network, task.eval_images, rows)
    print(f"clients {summary.cohort}: {summary.record['bytes_up']:,} bytes up, {summary.record['bytes_down']:,} down")
    print(f"{run.space.trained:,} coordinates moved by {summary.record['update_norm']:.4f} in all")
    print(f"validation accuracy before: {100 * before.accuracy:.1f} %, loss {before.loss:.3f}")
    print(f"validation accuracy after round {state.round}: {100 * result.accuracy:.1f} %, loss {result.loss:.3f}")


if __name__ == "__main__":
    main()
