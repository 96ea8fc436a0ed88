"""fedgraft: adapt one pretrained vision model to data that many owners keep private.

The public names. Each is imported when it is first used, so that `import fedgraft` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedgraft import data as data
    from fedgraft import registry as registry
    from fedgraft.data import partition as partition
    from fedgraft.aggregate.server_rules import RoundInfo as RoundInfo, ServerRule as ServerRule
    from fedgraft.aggregate.slots import Aggregator as Aggregator, Answers as Answers, Mixing as Mixing, Observe as Observe, Weighting as Weighting, by_examples as by_examples, uniform as uniform
    from fedgraft.aggregate.robust import robust_aggregator as robust_aggregator
    from fedgraft.algorithm import Algorithm as Algorithm, ClientState as ClientState, vary as vary
    from fedgraft.client import handle as handle
    from fedgraft.collect import Engine as Engine, ServerContext as ServerContext
    from fedgraft.config.load import load as load_config
    from fedgraft.config.options import Config as Config
    from fedgraft.context import ClientContext as ClientContext
    from fedgraft.data.federated import FederatedData as FederatedData
    from fedgraft.edit.dense import body as body, everything as everything, head as head, last_blocks as last_blocks
    from fedgraft.edit.low_rank import LowRank as lora
    from fedgraft.edit.sparse import Sparse as sparse
    from fedgraft.edit.space import EditSpace as EditSpace
    from fedgraft.errors import FedgraftError as FedgraftError, MissingExtra as MissingExtra
    from fedgraft.local.evaluate import evaluate as evaluate
    from fedgraft.local.losses import Loss as Loss, cross_entropy as cross_entropy
    from fedgraft.local.train import LocalTraining as LocalTraining
    from fedgraft.messages import Order as Order, Reply as Reply
    from fedgraft.models.backbones import load_network as load_network, load_network as model
    from fedgraft.privacy.protection import DifferentialPrivacy as DifferentialPrivacy, private as private, secure as secure
    from fedgraft.round import RoundSummary as RoundSummary, run_round as run_round
    from fedgraft.runs.adapted import adapted as adapted, evaluate_run as evaluate_run, export_run as export_run
    from fedgraft.runs.api import Result as Result, run as run, load_job as load, run_loaded as run_loaded
    from fedgraft.runs.callbacks import Callback as Callback
    from fedgraft.runs.centralized import run_centralized as run_centralized
    from fedgraft.runs.job import Job as Job, job_of as job_of
    from fedgraft.runs.run import one_thread as one_thread, run as run_config
    from fedgraft.runs.run_folder import RunFolder as RunFolder, list_runs as list_runs
    from fedgraft.runs.task import Task as Task
    from fedgraft.server import start as start
    from fedgraft.state import Federation as Federation, ServerState as ServerState
    from fedgraft.zoo import named as named, fedavg as fedavg, fedsgd as fedsgd, fedprox as fedprox, scaffold as scaffold, feddyn as feddyn, fednova as fednova, fedgma as fedgma, fedavgm as fedavgm, fedadam as fedadam, fedyogi as fedyogi, fedadagrad as fedadagrad, fedalign as fedalign, fedbabu as fedbabu, fedshibu as fedshibu, fedavg_crsm as fedavg_crsm, local_only as local_only, fedper as fedper, fedrep as fedrep, ditto as ditto

_HOMES = {
    "Aggregator": "aggregate.slots",
    "Algorithm": "algorithm",
    "Answers": "aggregate.slots",
    "Callback": "runs.callbacks",
    "ClientContext": "context",
    "ClientState": "algorithm",
    "Config": "config.options",
    "DifferentialPrivacy": "privacy.protection",
    "EditSpace": "edit.space",
    "Engine": "collect",
    "FederatedData": "data.federated",
    "Federation": "state",
    "FedgraftError": "errors",
    "Job": "runs.job",
    "LocalTraining": "local.train",
    "Loss": "local.losses",
    "MissingExtra": "errors",
    "Mixing": "aggregate.slots",
    "Observe": "aggregate.slots",
    "Order": "messages",
    "Reply": "messages",
    "Result": "runs.api",
    "RoundInfo": "aggregate.server_rules",
    "RoundSummary": "round",
    "RunFolder": "runs.run_folder",
    "ServerContext": "collect",
    "ServerRule": "aggregate.server_rules",
    "ServerState": "state",
    "Task": "runs.task",
    "Weighting": "aggregate.slots",
    "adapted": "runs.adapted",
    "body": "edit.dense",
    "by_examples": "aggregate.slots",
    "cross_entropy": "local.losses",
    "data": "data:",
    "ditto": "zoo",
    "evaluate": "local.evaluate",
    "evaluate_run": "runs.adapted",
    "everything": "edit.dense",
    "export_run": "runs.adapted",
    "fedadagrad": "zoo",
    "fedadam": "zoo",
    "fedalign": "zoo",
    "fedavg": "zoo",
    "fedavg_crsm": "zoo",
    "fedavgm": "zoo",
    "fedbabu": "zoo",
    "feddyn": "zoo",
    "fedgma": "zoo",
    "fednova": "zoo",
    "fedper": "zoo",
    "fedprox": "zoo",
    "fedrep": "zoo",
    "fedsgd": "zoo",
    "fedshibu": "zoo",
    "fedyogi": "zoo",
    "handle": "client",
    "head": "edit.dense",
    "job_of": "runs.job",
    "last_blocks": "edit.dense",
    "list_runs": "runs.run_folder",
    "load": "runs.api:load_job",
    "load_config": "config.load:load",
    "load_network": "models.backbones",
    "local_only": "zoo",
    "lora": "edit.low_rank:LowRank",
    "model": "models.backbones:load_network",
    "named": "zoo",
    "one_thread": "runs.run",
    "partition": "data.partition:",
    "private": "privacy.protection",
    "registry": "registry:",
    "robust_aggregator": "aggregate.robust",
    "run": "runs.api",
    "run_centralized": "runs.centralized",
    "run_config": "runs.run:run",
    "run_loaded": "runs.api",
    "run_round": "round",
    "scaffold": "zoo",
    "secure": "privacy.protection",
    "sparse": "edit.sparse:Sparse",
    "start": "server",
    "uniform": "aggregate.slots",
    "vary": "algorithm",
}
"""Where each public name lives: `module`, `module:name` under another name, `module:` for the module itself."""

__all__ = ["__version__", *_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name on first use and keep it (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("fedgraft")
    elif name in _HOMES:
        module, colon, other = _HOMES[name].partition(":")
        found = import_module(f"fedgraft.{module}")
        value = found if colon and not other else getattr(found, other or name)
    else:
        raise AttributeError(f"module 'fedgraft' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
