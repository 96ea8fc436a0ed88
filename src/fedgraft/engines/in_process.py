"""The reference engine: clients one after another in this process, each on one thread, in client order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.handle import ClientContext, ClientMemory, carry_out
from fedgraft.core.messages import Order, Reply
from fedgraft.core.progress import asking


class InProcess:
    """Carries out orders with one context. `memory` is what each client keeps; it belongs to the checkpoint."""

    def __init__(self, algorithm: Algorithm, context: ClientContext) -> None:
        self.algorithm = algorithm
        self.context = context
        self.memory: dict[int, ClientMemory] = {}

    def exchange(self, orders: Sequence[Order]) -> Iterator[Reply | tuple[int, str]]:
        """Carry out the orders one by one; (client, sentence) stands for one that was refused."""
        with asking(orders) as asked:
            for order in orders:
                reply, kept = carry_out(order, self.algorithm, self.context, self.memory.get(order.client, {}))
                if kept:
                    self.memory[order.client] = kept
                asked.advance()
                yield (order.client, reply) if isinstance(reply, str) else reply
