"""The reference engine: clients one after another in this process, each on one thread, in client order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.actions import progress_label
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle_or_refuse
from fedgraft.core.client_memory import ClientMemory, Memories
from fedgraft.core.messages import Request, Response
from fedgraft.core.progress import requests_phase


class InProcess(Memories):
    """Carries out orders with one context. `memory` is what each client keeps; it belongs to the checkpoint."""

    def __init__(self, algorithm: Algorithm, context: ClientContext) -> None:
        self.algorithm = algorithm
        self.context = context
        self.memory: dict[int, ClientMemory] = {}

    def exchange(self, requests: Sequence[Request]) -> Iterator[Response | tuple[int, str]]:
        """Carry out the orders one by one; (client, sentence) stands for one that was refused."""
        with requests_phase(requests, progress_label) as asked:
            for request in requests:
                response, kept = handle_or_refuse(
                    request, self.algorithm, self.context, self.memory.get(request.client, {})
                )
                if kept:
                    self.memory[request.client] = kept
                asked.advance()
                yield (request.client, response) if isinstance(response, str) else response
