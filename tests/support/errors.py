"""Asserting errors by their stable code and fields instead of by their sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from fedgraft.core.errors import FedgraftError


@contextmanager
def raises(code: str, **fields: Any) -> Iterator[pytest.ExceptionInfo[FedgraftError]]:
    """Expect a `FedgraftError` of this code whose `fields` contain these."""
    with pytest.raises(FedgraftError) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"expected {code}, got {error.code}: {error}"
    for name, value in fields.items():
        assert error.fields.get(name) == value, f"field {name!r} of {code} is {error.fields.get(name)!r}, not {value!r}"
