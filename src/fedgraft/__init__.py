"""fedgraft: adapt one pretrained vision model to data that many owners keep private.

The public names. Each is imported when it is first used, so that `import fedgraft` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedgraft.algorithm import Algorithm, Answers, Combiner, Keeps, Mixture, Moves, Observe, Weigher, vary
    from fedgraft.client import Workplace, handle
    from fedgraft.combine.server_rules import RoundInfo, ServerRule
    from fedgraft.data.partition import make_partition
    from fedgraft.data.sources import load_dataset
    from fedgraft.edit.space import EditSpace
    from fedgraft.errors import FedgraftError, MissingExtra
    from fedgraft.experiment.adapted import adapted, evaluate_run, export_run
    from fedgraft.experiment.build import Setup
    from fedgraft.experiment.centralized import run_centralized
    from fedgraft.experiment.config import Config
    from fedgraft.experiment.config import load as load_config
    from fedgraft.experiment.record import RunFolder, list_runs
    from fedgraft.experiment.run import install_head, one_thread, run
    from fedgraft.local.evaluate import evaluate
    from fedgraft.local.train import LocalRule
    from fedgraft.messages import Order, Reply
    from fedgraft.models.backbones import load_network
    from fedgraft.round import Engine, RoundSummary, run_round
    from fedgraft.server import Federation, ServerState, start
    from fedgraft.zoo import ZOO, named

_HOMES = {
    "Algorithm": "algorithm",
    "Answers": "algorithm",
    "Combiner": "algorithm",
    "Keeps": "algorithm",
    "Mixture": "algorithm",
    "Moves": "algorithm",
    "Observe": "algorithm",
    "Weigher": "algorithm",
    "vary": "algorithm",
    "Workplace": "client",
    "handle": "client",
    "RoundInfo": "combine.server_rules",
    "ServerRule": "combine.server_rules",
    "make_partition": "data.partition",
    "load_dataset": "data.sources",
    "EditSpace": "edit.space",
    "FedgraftError": "errors",
    "MissingExtra": "errors",
    "adapted": "experiment.adapted",
    "evaluate_run": "experiment.adapted",
    "export_run": "experiment.adapted",
    "Setup": "experiment.build",
    "run_centralized": "experiment.centralized",
    "Config": "experiment.config",
    "load_config": "experiment.config:load",
    "RunFolder": "experiment.record",
    "list_runs": "experiment.record",
    "install_head": "experiment.run",
    "one_thread": "experiment.run",
    "run": "experiment.run",
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
    "Algorithm",
    "Answers",
    "Combiner",
    "Config",
    "EditSpace",
    "Engine",
    "Federation",
    "FedgraftError",
    "Keeps",
    "LocalRule",
    "MissingExtra",
    "Mixture",
    "Moves",
    "Observe",
    "Order",
    "Reply",
    "RoundInfo",
    "RoundSummary",
    "RunFolder",
    "ServerRule",
    "ServerState",
    "Setup",
    "Weigher",
    "Workplace",
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
