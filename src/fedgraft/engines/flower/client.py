"""The ClientApp: takes a request out of a Flower message, has it carried out, and replies with the response.

A client's memory never goes through here to the server: on a node it is in the worker's folder, in a simulation in
Flower's own state of the node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp

from fedgraft.core.errors import FedgraftError
from fedgraft.engines.flower.node_link import WorkerRequest, WorkerResponse, public_reason
from fedgraft.engines.flower.transport import HELLO, REQUEST, name_list, text_setting, whole_number
from fedgraft.engines.flower.wire import as_record, pack_content, unpack_content

Slots = MutableMapping[str, bytes]
"""Two places for a client's memory: the present one and the one before."""
Serve = Callable[[WorkerRequest, Slots], WorkerResponse]
"""Carries out a request with the memory in the slots."""


class StateSlots(MutableMapping[str, bytes]):
    """A client's memory in Flower's state of a simulated node: each slot's bytes as one array record."""

    def __init__(self, context: Context) -> None:
        self.state = context.state

    def __getitem__(self, name: str) -> bytes:
        record = self.state[name]
        assert isinstance(record, ArrayRecord)
        return record["bytes"].data

    def __setitem__(self, name: str, data: bytes) -> None:
        self.state[name] = as_record(data)

    def __delitem__(self, name: str) -> None:
        del self.state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def request_of(message: Message, context: Context, settings: Mapping[str, Any]) -> WorkerRequest:
    """Return the `WorkerRequest` in a Flower message, with the client number and data of this node.

    `settings` are the run's: config, folder, task. Raises if the node has no client number ("partition-id").
    """
    arrays, words = unpack_content(message.content)
    client = context.node_config.get("partition-id")
    if type(client) is not int or client < 0:
        raise FedgraftError(
            "E-ENGINES-NO-CLIENT-NUMBER",
            "this node does not know its client number",
            "start it with --node-config 'partition-id=0'",
        )
    return WorkerRequest(
        config=str(settings.get("config", "")),
        folder=str(settings.get("folder", "")),
        client=client,
        run=context.run_id,
        data=str(context.node_config.get("data", "")),
        source=str(context.node_config.get("source", "")),
        after=whole_number(words, "after", 0),
        becomes=whole_number(words, "becomes", 0),
        digest=text_setting(words, "digest"),
        classes=name_list(words, "classes"),
        request=arrays.get("request", b""),
        opened=arrays.get("opened", b""),
        task=str(settings.get("task", "")),
    )


def client_app(serve: Serve, settings: Mapping[str, Any] | None = None) -> ClientApp:
    """Return Flower's ClientApp: it unpacks messages, lets `serve` carry them out, and replies with the result.

    `settings` replace the run's own settings; None: Flower's `run_config`.
    """
    app = ClientApp()

    def reply(message: Message, context: Context) -> Message:
        """Return the reply to a greeting or a request; an error of ours becomes part of the reply."""
        try:
            request = request_of(message, context, settings or context.run_config)
            answer = serve(request, StateSlots(context))
        except FedgraftError as error:
            answer = WorkerResponse(error=public_reason(error))
        words = {"step": answer.step, "need": answer.need, "error": answer.error[:500], **answer.facts}
        arrays = {}
        if answer.response:
            arrays["response"] = as_record(answer.response)
        return Message(pack_content(arrays, words), reply_to=message)

    app.query(HELLO.partition(".")[2])(reply)
    app.train(REQUEST.partition(".")[2])(reply)
    return app
