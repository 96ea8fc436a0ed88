"""Class names that mean the same: slips that are found, and the map that settles them (`data.class_map`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.sources.assemble import Dataset, Store


def slips(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Pairs of names that differ by spaces, case, punctuation or one letter, and by which of them."""
    found = []
    for one, other in combinations(sorted(names), 2):
        if one.strip() == other.strip():
            found.append((one, other, "class_space"))
        elif one.strip().casefold() == other.strip().casefold():
            found.append((one, other, "class_case"))
        elif _letters(one) == _letters(other):
            found.append((one, other, "class_punctuation"))
        elif _one_letter(_letters(one), _letters(other)):
            found.append((one, other, "class_similar"))
    return found


@cache
def _letters(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


def _one_letter(one: str, other: str) -> bool:
    """Whether words of at least five letters differ by one letter more, less or other; numbers are never slips."""
    one, other = sorted((one, other), key=len)
    if len(one) < 5 or len(other) - len(one) > 1:
        return False
    start = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    longer = len(other) - len(one)
    if one[start + 1 - longer :] != other[start + 1 :]:
        return False
    return not (one[start : start + 1] + other[start : start + 1]).strip().isdigit() and other[start].isalpha()


def one_class(names: Iterable[str]) -> list[list[str]]:
    """Names that are the same but for spaces, case or punctuation, together; each is looked at once."""
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        groups.setdefault(re.sub(r"[\W_]+", "", name).casefold(), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def check_names(names: Sequence[str]) -> None:
    """Refuse names that are the same but for spaces, case or punctuation."""
    for one, other, *_ in one_class(names):
        raise FedgraftError(
            f"the classes {one!r} and {other!r} look like one; rename one of them, or say so with: "
            f"data.class_map = {{{other!r} = {one!r}}}.".replace("'", '"')
        )


def odd_names(told: Mapping[int, Sequence[str]]) -> dict[str, str]:
    """Names that one client alone has where two or more others write the class otherwise, and what to tell it."""
    owners: dict[str, set[int]] = {}
    for client, names in told.items():
        for name in names:
            owners.setdefault(name, set()).add(client)
    found = {}
    for group in one_class(owners):
        usual = max(group, key=lambda name: len(owners[name]))
        for name in group:
            if name != usual and len(owners[name]) == 1 and len(owners[usual] - owners[name]) > 1:
                others = len(owners[usual] - owners[name])
                found[name] = (
                    f"its class {name!r} looks like {usual!r}, as {others} others call it: it renames that, or the "
                    f"config says data.class_map = {{{name!r} = {usual!r}}}"
                )
    return found


def renamed(dataset: Dataset, names: Mapping[str, str] | None) -> Dataset:
    """The dataset with its classes under other names; two that get one name become one class."""
    if not names:
        return dataset
    if strange := [name for name in names.values() if name in names and names[name] != name]:
        raise FedgraftError(f"data.class_map sends a class to {strange[0]!r}, and that one elsewhere; name the last.")
    train = _renamed(dataset.train, names)
    return replace(dataset, train=train, test=_renamed(dataset.test, names))


def _renamed(store: Store, names: Mapping[str, str]) -> Store:
    new = [names.get(name, name) for name in store.classes]
    classes = tuple(dict.fromkeys([*(name for name in store.classes if name in new), *new]))
    place = np.array([classes.index(name) for name in new], dtype=np.int64)
    digest = hashlib.blake2b("\x1f".join([store.digest, *new]).encode(), digest_size=16).hexdigest()
    return replace(store, labels=place[store.labels], classes=classes, digest=digest)
