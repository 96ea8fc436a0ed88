"""Class names that mean the same: find misspellings, and rename classes by a map (`data.class_map`)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np

from fedgraft.core.errors import FedgraftError
from fedgraft.data.labelled import require_classes
from fedgraft.data.sources.assemble import Dataset, Store

_SHORTEST_WORD = 5  # letters from which one different letter is taken for a slip


def similar_names(names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return pairs of names that may be misspellings of one class: (first, second, kind of difference).

    The kinds are class_space, class_case, class_punctuation and class_similar (one letter).
    """
    pairs = []
    for first, second in combinations(sorted(names), 2):
        if first.strip() == second.strip():
            pairs.append((first, second, "class_space"))
        elif first.strip().casefold() == second.strip().casefold():
            pairs.append((first, second, "class_case"))
        elif _letters(first) == _letters(second):
            pairs.append((first, second, "class_punctuation"))
        elif _differ_by_one_letter(_letters(first), _letters(second)):
            pairs.append((first, second, "class_similar"))
    return pairs


@cache
def _letters(name: str) -> str:
    """Return the letters and digits of a name, in small letters."""
    return re.sub(r"[\W_]+", "", name).casefold()


def _differ_by_one_letter(first: str, second: str) -> bool:
    """Return whether words of at least five letters differ by one letter more, less or other; never by a digit."""
    shorter, longer = sorted((first, second), key=len)
    extra = len(longer) - len(shorter)
    if len(shorter) < _SHORTEST_WORD or extra > 1:
        return False
    start = 0  # of the first difference
    while start < len(shorter) and shorter[start] == longer[start]:
        start += 1
    if shorter[start + 1 - extra :] != longer[start + 1 :]:
        return False
    different = shorter[start : start + 1] + longer[start : start + 1]
    return not different.strip().isdigit() and longer[start].isalpha()


def same_class_groups(names: Iterable[str]) -> list[list[str]]:
    """Return groups of two or more names that are the same but for spaces, case or punctuation."""
    groups: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        groups.setdefault(_letters(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def check_names(names: Sequence[str]) -> None:
    """Refuse names that are the same but for spaces, case or punctuation."""
    for group in same_class_groups(names):
        first = group[0]
        second = group[1]
        class_map = f"data.class_map = {{{second!r} = {first!r}}}".replace("'", '"')
        raise FedgraftError(
            "E-DATA-SIMILAR-CLASSES",
            f'the classes "{first}" and "{second}" look like one',
            f"rename one of them, or say so with: {class_map}",
            classes=(first, second),
        )


def odd_names(names_by_client: Mapping[int, Sequence[str]]) -> dict[str, str]:
    """Return the class names that one client alone uses where two or more others spell the class otherwise.

    The value is a sentence that says which spelling the others use. `names_by_client` are the classes of each client.
    """
    owners: dict[str, set[int]] = {}
    for client, names in names_by_client.items():
        for name in names:
            owners.setdefault(name, set()).add(client)
    advice: dict[str, str] = {}
    for group in same_class_groups(owners):
        usual = max(group, key=lambda name: len(owners[name]))
        for name in group:
            others = len(owners[usual] - owners[name])
            if name != usual and len(owners[name]) == 1 and others > 1:
                advice[name] = (
                    f"its class {name!r} looks like {usual!r}, as {others} others call it: it renames that, or the "
                    f"config says data.class_map = {{{name!r} = {usual!r}}}"
                )
    return advice


def renamed(dataset: Dataset, names: Mapping[str, str] | None) -> Dataset:
    """Return the dataset with its classes renamed by a map from old to new; two that get one name become one class."""
    if not names:
        return dataset
    require_classes(dataset.train, "data.class_map")
    for new_name in names.values():
        if names.get(new_name, new_name) != new_name:
            raise FedgraftError(
                "E-DATA-CLASS-MAP-CHAIN",
                f"data.class_map sends a class to {new_name!r}, and that one elsewhere",
                "name the last one",
                label=new_name,
            )
    train = _renamed_store(dataset.train, names)
    test = _renamed_store(dataset.test, names)
    return replace(dataset, train=train, test=test)


def _renamed_store(store: Store, names: Mapping[str, str]) -> Store:
    """Return the store with renamed classes; names that stay keep their order and come first."""
    new_names = [names.get(name, name) for name in store.classes]
    unchanged = [name for name in store.classes if name in new_names]
    classes = tuple(dict.fromkeys([*unchanged, *new_names]))
    place = np.array([classes.index(name) for name in new_names], dtype=np.int64)
    digest = hashlib.blake2b("\x1f".join([store.digest, *new_names]).encode(), digest_size=16).hexdigest()
    return replace(store, labels=place[store.labels], classes=classes, digest=digest)
