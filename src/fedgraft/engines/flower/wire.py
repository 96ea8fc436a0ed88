"""fedgraft's messages as Flower messages: a flat byte string in one array, and a few plain settings beside it.

Flower pays per array, so a request or a response is one array of bytes, whatever it holds; only the opened edit space
(the tensors from which a node rebuilds the run's edit space) travels as a second one, once per node. Everything that
arrives is untrusted: `unpack_content` returns only values of the right type and never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

_STYPE = "fedgraft"
_SETTINGS = "words"  # the name of the record of settings


def as_record(data: bytes) -> ArrayRecord:
    """Return bytes as one flat array; a record in many messages is hashed and stored once."""
    return ArrayRecord({"bytes": Array("uint8", (len(data),), _STYPE, data)})


def pack_content(parts: Mapping[str, ArrayRecord], settings: Mapping[str, Any]) -> RecordDict:
    """Return the content of a Flower message with these byte strings (of `as_record`) and settings."""
    return RecordDict({**parts, _SETTINGS: ConfigRecord(dict(settings))})


def unpack_content(content: RecordDict) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the byte strings and the settings of a message; missing values and those of another type are left out."""
    parts = {}
    for name, record in content.items():
        if not isinstance(record, ArrayRecord):
            continue
        array = record.get("bytes")
        if array is not None and array.stype == _STYPE:
            parts[name] = array.data
    settings = content.get(_SETTINGS)
    if not isinstance(settings, ConfigRecord):
        return parts, {}
    return parts, dict(settings)


def server_app(main: Callable[[Grid, Context], None]) -> ServerApp:
    """Return a ServerApp that runs `main`."""
    app = ServerApp()
    app.main()(main)
    return app


def run_flower_simulation(server: ServerApp, client: ClientApp, nodes: int, gpus: float = 0.0) -> None:
    """Run both apps in Flower's simulation, with Ray workers of one core each instead of nodes.

    `gpus` is each worker's share of a GPU; Ray hides GPUs from workers that ask for none.
    """
    from flwr.simulation import run_simulation

    run_simulation(server, client, nodes, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": gpus}})
