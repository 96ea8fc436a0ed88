"""Code of your own during a run: a line per round, and the state whenever you want to look at it."""

import fedgraft as fg


class Watch(fg.Callback):
    """Override the events you need; what happens here cannot change the result."""

    def on_round_end(self, line, state):
        """`line` is this round's line of metrics.jsonl, `state` the server's."""
        print(f"round {line['round']}: loss {line['train_loss']:.3f}, model of norm {state.vector.norm():.2f}")

    def on_run_end(self, summary):
        """After the final test."""
        print(f"test accuracy {summary['test']['accuracy']:.3f}, {summary['bytes_up']:,} bytes up")


clients = fg.partition.iid(fg.data.digits(), clients=5)
algorithm = fg.fedavg(trainable=fg.head(), local=fg.LocalTraining(steps=32, lr=0.03))
result = fg.run(algorithm, fg.model("nano"), clients, rounds=6, head="random", callbacks=[Watch()])
print(result)
