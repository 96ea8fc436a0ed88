"""fedgraft: adapt one pretrained vision model to data that many owners keep private.

The public names. Each is imported when it is first used, so that `import fedgraft` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedgraft.aggregate.server_rules import RoundInfo, ServerRule
    from fedgraft.algorithm import (
        Aggregator,
        Algorithm,
        Answers,
        ClientState,
        Mixing,
        Observe,
        Trainable,
        Weighting,
        vary,
    )
    from fedgraft.client import ClientContext, handle
    from fedgraft.config.load import Config
    from fedgraft.config.load import load as load_config
    from fedgraft.data.partition import make_partition
    from fedgraft.data.sources import load_dataset
    from fedgraft.edit.space import EditSpace
    from fedgraft.errors import FedgraftError, MissingExtra
    from fedgraft.local.evaluate import evaluate
    from fedgraft.local.train import LocalRule
    from fedgraft.messages import Order, Reply
    from fedgraft.models.backbones import load_network
    from fedgraft.round import Engine, RoundSummary, run_round
    from fedgraft.runs.adapted import adapted, evaluate_run, export_run
    from fedgraft.runs.centralized import run_centralized
    from fedgraft.runs.run import install_head, one_thread, run
    from fedgraft.runs.run_folder import RunFolder, list_runs
    from fedgraft.runs.setup import Setup
    from fedgraft.server import Federation, ServerState, start
    from fedgraft.zoo import ZOO, named

_HOMES = {
    "Algorithm": "algorithm",
    "Answers": "algorithm",
    "Aggregator": "algorithm",
    "ClientState": "algorithm",
    "Mixing": "algorithm",
    "Trainable": "algorithm",
    "Observe": "algorithm",
    "Weighting": "algorithm",
    "vary": "algorithm",
    "ClientContext": "client",
    "handle": "client",
    "RoundInfo": "aggregate.server_rules",
    "ServerRule": "aggregate.server_rules",
    "make_partition": "data.partition",
    "load_dataset": "data.sources",
    "EditSpace": "edit.space",
    "FedgraftError": "errors",
    "MissingExtra": "errors",
    "adapted": "runs.adapted",
    "evaluate_run": "runs.adapted",
    "export_run": "runs.adapted",
    "Setup": "runs.setup",
    "run_centralized": "runs.centralized",
    "Config": "config.load",
    "load_config": "config.load:load",
    "RunFolder": "runs.run_folder",
    "list_runs": "runs.run_folder",
    "install_head": "runs.run",
    "one_thread": "runs.run",
    "run": "runs.run",
    "evaluate": "local.evaluate",
    "LocalRule": "local.train",
    "Order": "messages",
    "Reply": "messages",
    "load_network": "models.backbones",
    "Engine": "round",
    "RoundSummary": "round",
    "run_round": "round",
    "Federation": "server",
    "ServerState": "server",
    "start": "server",
    "ZOO": "zoo",
    "named": "zoo",
}
"""Where each public name lives; `module:name` where it has another name at home."""

__all__ = [
    "ZOO",
    "Aggregator",
    "Algorithm",
    "Answers",
    "ClientContext",
    "ClientState",
    "Config",
    "EditSpace",
    "Engine",
    "Federation",
    "FedgraftError",
    "LocalRule",
    "MissingExtra",
    "Mixing",
    "Observe",
    "Order",
    "Reply",
    "RoundInfo",
    "RoundSummary",
    "RunFolder",
    "ServerRule",
    "ServerState",
    "Setup",
    "Trainable",
    "Weighting",
    "__version__",
    "adapted",
    "evaluate",
    "evaluate_run",
    "export_run",
    "handle",
    "install_head",
    "list_runs",
    "load_config",
    "load_dataset",
    "load_network",
    "make_partition",
    "named",
    "one_thread",
    "run",
    "run_centralized",
    "run_round",
    "start",
    "vary",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use and keep it (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fedgraft")
    elif name in _HOMES:
        module, _, original = _HOMES[name].partition(":")
        value = getattr(import_module(f"fedgraft.{module}"), original or name)
    else:
        raise AttributeError(f"module 'fedgraft' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
