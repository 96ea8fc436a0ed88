"""fedgraft: adapt one pretrained vision model to data that many owners keep private.

The public names. Each is imported when it is first used, so that `import fedgraft` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedgraft import data as data
    from fedgraft import registry as registry
    from fedgraft.aggregate.robust import robust_aggregator as robust_aggregator
    from fedgraft.aggregate.server_rules import RoundInfo as RoundInfo
    from fedgraft.aggregate.server_rules import ServerRule as ServerRule
    from fedgraft.aggregate.slots import Aggregator as Aggregator
    from fedgraft.aggregate.slots import Answers as Answers
    from fedgraft.aggregate.slots import Mixing as Mixing
    from fedgraft.aggregate.slots import Observe as Observe
    from fedgraft.aggregate.slots import Weighting as Weighting
    from fedgraft.aggregate.slots import by_examples as by_examples
    from fedgraft.aggregate.slots import uniform as uniform
    from fedgraft.algorithm import Algorithm as Algorithm
    from fedgraft.algorithm import ClientState as ClientState
    from fedgraft.algorithm import vary as vary
    from fedgraft.client import handle as handle
    from fedgraft.collect import Engine as Engine
    from fedgraft.collect import ServerContext as ServerContext
    from fedgraft.config.load import load as load_config
    from fedgraft.config.options import Config as Config
    from fedgraft.context import ClientContext as ClientContext
    from fedgraft.data import partition as partition
    from fedgraft.data.federated import FederatedData as FederatedData
    from fedgraft.edit.dense import body as body
    from fedgraft.edit.dense import everything as everything
    from fedgraft.edit.dense import head as head
    from fedgraft.edit.dense import last_blocks as last_blocks
    from fedgraft.edit.low_rank import LowRank as lora
    from fedgraft.edit.space import EditSpace as EditSpace
    from fedgraft.edit.sparse import Sparse as sparse
    from fedgraft.errors import FedgraftError as FedgraftError
    from fedgraft.errors import MissingExtra as MissingExtra
    from fedgraft.local.evaluate import evaluate as evaluate
    from fedgraft.local.losses import Loss as Loss
    from fedgraft.local.losses import cross_entropy as cross_entropy
    from fedgraft.local.memory import one_thread as one_thread
    from fedgraft.local.train import LocalTraining as LocalTraining
    from fedgraft.messages import Order as Order
    from fedgraft.messages import Reply as Reply
    from fedgraft.models.backbones import model as model
    from fedgraft.models.foreign import module as module
    from fedgraft.privacy.protection import DifferentialPrivacy as DifferentialPrivacy
    from fedgraft.privacy.protection import private as private
    from fedgraft.privacy.protection import secure as secure
    from fedgraft.round import RoundSummary as RoundSummary
    from fedgraft.round import run_round as run_round
    from fedgraft.runs.adapted import adapted as adapted
    from fedgraft.runs.api import Result as Result
    from fedgraft.runs.api import load_job as load
    from fedgraft.runs.api import run as run
    from fedgraft.runs.callbacks import Callback as Callback
    from fedgraft.runs.centralized import run_centralized as run_centralized
    from fedgraft.runs.deliver import export_run as export_run
    from fedgraft.runs.engines import Engines as Engines
    from fedgraft.runs.head_init import install_head as install_head
    from fedgraft.runs.job import Job as Job
    from fedgraft.runs.job import job_of as job_of
    from fedgraft.runs.opening import open_run as open_run
    from fedgraft.runs.predict import evaluate_run as evaluate_run
    from fedgraft.runs.predict import predictor as predictor
    from fedgraft.runs.run import run as run_config
    from fedgraft.runs.run_folder import RunFolder as RunFolder
    from fedgraft.runs.run_folder import list_runs as list_runs
    from fedgraft.runs.task import Task as Task
    from fedgraft.runs.tracking import Silent as Silent
    from fedgraft.server import start as start
    from fedgraft.state import Federation as Federation
    from fedgraft.state import ServerState as ServerState
    from fedgraft.zoo import ditto as ditto
    from fedgraft.zoo import fed3r as fed3r
    from fedgraft.zoo import fedadagrad as fedadagrad
    from fedgraft.zoo import fedadam as fedadam
    from fedgraft.zoo import fedala as fedala
    from fedgraft.zoo import fedalign as fedalign
    from fedgraft.zoo import fedavg as fedavg
    from fedgraft.zoo import fedavg_crsm as fedavg_crsm
    from fedgraft.zoo import fedavgm as fedavgm
    from fedgraft.zoo import fedawa as fedawa
    from fedgraft.zoo import fedbabu as fedbabu
    from fedgraft.zoo import fedbn as fedbn
    from fedgraft.zoo import fedcof as fedcof
    from fedgraft.zoo import feddare as feddare
    from fedgraft.zoo import feddyn as feddyn
    from fedgraft.zoo import fedfisher as fedfisher
    from fedgraft.zoo import fedgma as fedgma
    from fedgraft.zoo import fedlc as fedlc
    from fedgraft.zoo import fedncm as fedncm
    from fedgraft.zoo import fednova as fednova
    from fedgraft.zoo import fedper as fedper
    from fedgraft.zoo import fedprobe as fedprobe
    from fedgraft.zoo import fedprox as fedprox
    from fedgraft.zoo import fedrep as fedrep
    from fedgraft.zoo import fedsa_lora as fedsa_lora
    from fedgraft.zoo import fedsb as fedsb
    from fedgraft.zoo import fedsgd as fedsgd
    from fedgraft.zoo import fedshibu as fedshibu
    from fedgraft.zoo import fedties as fedties
    from fedgraft.zoo import fedyogi as fedyogi
    from fedgraft.zoo import flasc as flasc
    from fedgraft.zoo import flexlora as flexlora
    from fedgraft.zoo import ifca as ifca
    from fedgraft.zoo import local_only as local_only
    from fedgraft.zoo import moon as moon
    from fedgraft.zoo import named as named
    from fedgraft.zoo import scaffold as scaffold

_HOMES = {
    "fedfisher": "zoo",
    "feddare": "zoo",
    "fedties": "zoo",
    "fedawa": "zoo",
    "flexlora": "zoo",
    "flasc": "zoo",
    "fedsb": "zoo",
    "fedcof": "zoo",
    "fedncm": "zoo",
    "fedprobe": "zoo",
    "fed3r": "zoo",
    "ifca": "zoo",
    "fedala": "zoo",
    "fedsa_lora": "zoo",
    "fedbn": "zoo",
    "moon": "zoo",
    "fedlc": "zoo",
    "Engines": "runs.engines",
    "install_head": "runs.head_init",
    "open_run": "runs.opening",
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
    "Silent": "runs.tracking",
    "Task": "runs.task",
    "Weighting": "aggregate.slots",
    "adapted": "runs.adapted",
    "body": "edit.dense",
    "by_examples": "aggregate.slots",
    "cross_entropy": "local.losses",
    "data": "data:",
    "ditto": "zoo",
    "evaluate": "local.evaluate",
    "evaluate_run": "runs.predict",
    "everything": "edit.dense",
    "export_run": "runs.deliver",
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
    "local_only": "zoo",
    "lora": "edit.low_rank:LowRank",
    "model": "models.backbones",
    "module": "models.foreign",
    "named": "zoo",
    "one_thread": "local.memory",
    "partition": "data.partition:",
    "predictor": "runs.predict",
    "private": "privacy.protection",
    "registry": "registry:",
    "robust_aggregator": "aggregate.robust",
    "run": "runs.api",
    "run_centralized": "runs.centralized",
    "run_config": "runs.run:run",
    "run_round": "round",
    "scaffold": "zoo",
    "secure": "privacy.protection",
    "sparse": "edit.sparse:Sparse",
    "start": "server",
    "uniform": "aggregate.slots",
    "vary": "algorithm",
}
"""Where each public name lives: `module`, `module:name` under another name, `module:` for the module itself."""

__all__ = ["__version__", *_HOMES]


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
