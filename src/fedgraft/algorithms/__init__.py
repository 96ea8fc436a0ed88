"""The algorithms of the literature as compositions: each differs from another one in a few slots.

`ALGORITHMS` maps a name to a function of plain numbers and slots; `named` builds an algorithm by its name.
"""

from __future__ import annotations

from typing import Any

from fedgraft.algorithms.algorithm import Algorithm
from fedgraft.algorithms.averaging import (
    central,
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    feddyn,
    fedgma,
    fedlc,
    fednova,
    fedova,
    fedprox,
    fedsgd,
    fedyogi,
    moon,
    scaffold,
)
from fedgraft.algorithms.closed_form_heads import fed3r, fedcof, fedlda, fedncm, fedprobe
from fedgraft.algorithms.low_rank import fedrpca, fedsa_lora, fedsb, flasc, flexlora, la_lora, lora_fair, rolora
from fedgraft.algorithms.personalized import (
    ditto,
    fedala,
    fedavg_crsm,
    fedbabu,
    fedbn,
    fedper,
    fedrep,
    fedshibu,
    fedshibu_probe,
    ifca,
    local_only,
)
from fedgraft.algorithms.sparse import ssfl
from fedgraft.algorithms.weighted import fedalign, fedawa, feddare, feddisco, fedfisher, fedties
from fedgraft.core.registry import ALGORITHMS

TABLE = (
    fedavg,
    fedsgd,
    fedprox,
    scaffold,
    feddyn,
    fednova,
    fedgma,
    fedavgm,
    fedadam,
    fedyogi,
    fedadagrad,
    fedlc,
    fedova,
    moon,
    fedalign,
    fedawa,
    feddisco,
    fedties,
    feddare,
    fedfisher,
    fedbabu,
    fedshibu,
    fedshibu_probe,
    fedavg_crsm,
    local_only,
    fedper,
    fedrep,
    fedbn,
    fedala,
    ifca,
    ditto,
    fedsa_lora,
    fedsb,
    flexlora,
    flasc,
    rolora,
    la_lora,
    lora_fair,
    fedrpca,
    ssfl,
    fed3r,
    fedprobe,
    fedncm,
    fedcof,
    fedlda,
    central,
)
ALGORITHMS |= {make.__name__: make for make in TABLE}
__all__ = ["ALGORITHMS", "TABLE", "named", *(make.__name__ for make in TABLE)]


def named(name: str, **options: Any) -> Algorithm:
    """Return the algorithm of this name; options and slots it does not have are refused."""
    own_options = {}
    slots = {}
    for key, value in options.items():
        if key in Algorithm.__dataclass_fields__:
            slots[key] = value
        else:
            own_options[key] = value
    algorithm: Algorithm = ALGORITHMS.build(name, own_options, **slots)
    return algorithm
