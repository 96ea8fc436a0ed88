"""Closed-form heads in one exchange: no round is trained, the backbone is frozen, the head comes from client sums.

These are the baselines that training has to beat. As an initialisation for any other algorithm the same heads are
`model.head = "ridge" | "probe" | "ncm" | "cof" | "lda"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from fedgraft.algorithms.algorithm import Algorithm, vary
from fedgraft.algorithms.averaging import fedavg, specified
from fedgraft.algorithms.typed_slots import Slots
from fedgraft.edit.dense import head


def _head_only(name: str, kind: str, slots: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm `name` that trains nothing and computes a head of this kind (a value of model.head)."""
    algorithm = fedavg(**{"trainable": head(), **specified(slots)})
    return vary(algorithm, name=name, closed_form=kind)


def fed3r(**slots: Unpack[Slots]) -> Algorithm:
    """Fanì et al. 2024: ridge regression from summed statistics; also known as analytic federated learning.

    Unlike the paper's: an unpenalized bias, centred targets, a penalty relative to the features' energy, a temperature.
    """
    return _head_only("fed3r", "ridge", slots)


def fedprobe(**slots: Unpack[Slots]) -> Algorithm:
    """Logistic regression by L-BFGS on summed gradients, on features whitened by the summed statistics."""
    return _head_only("fedprobe", "probe", slots)


def fedncm(**slots: Unpack[Slots]) -> Algorithm:
    """Legate et al. 2023: each class is its normalised mean feature.

    Unlike the paper's: scaled by a temperature chosen on validation, so that its softmax can be trained on.
    """
    return _head_only("fedncm", "ncm", slots)


def fedcof(**slots: Unpack[Slots]) -> Algorithm:
    """Goswami et al. 2025: class covariances from the spread of client means; in the clear only.

    Unlike the paper's: the penalty and a temperature are chosen on validation.
    """
    return _head_only("fedcof", "cof", slots)


def fedlda(**slots: Unpack[Slots]) -> Algorithm:
    """Gaussian classes of one covariance, from the sums of ridge regression (as in FedCGS 2025, GH-OFL 2026).

    Unlike theirs: the covariance is shrunk by a share chosen on validation, and a temperature.
    """
    return _head_only("fedlda", "lda", slots)
