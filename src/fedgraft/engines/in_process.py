"""The reference engine: clients train one after another in this process, each on one thread, in client order."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.client.actions import progress_label
from fedgraft.client.context import ClientContext
from fedgraft.client.handle import handle_or_refuse
from fedgraft.core.client_memory import ClientMemory, Memories
from fedgraft.core.messages import Request, Response
from fedgraft.core.progress import requests_phase


class InProcess(Memories):
    """The reference engine: carries out requests one after another with one context, in this process.

    `memory` holds the named tensors that each client remembers; it belongs to the checkpoint.
    """

    def __init__(self, algorithm: Algorithm, context: ClientContext) -> None:
        self.algorithm = algorithm
        self.context = context
        self.memory: MutableMapping[int, ClientMemory] = {}

    def exchange(self, requests: Sequence[Request]) -> Iterator[Response | tuple[int, str]]:
        """Yield the response to each request, or (client, reason) for a refused one.

        Store the clients' new memories.
        """
        with requests_phase(requests, progress_label) as phase:
            for request in requests:
                memory = self.memory.get(request.client, {})
                response, new_memory = handle_or_refuse(request, self.algorithm, self.context, memory)
                if new_memory:
                    self.memory[request.client] = new_memory
                phase.advance()
                if isinstance(response, str):
                    yield request.client, response
                else:
                    yield response
