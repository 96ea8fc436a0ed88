"""Sites: a test image without an owner is nobody's, not the first site's."""

from __future__ import annotations

import numpy as np
import pytest

from fedgraft.data.partition.partition import partition_by_owner


@pytest.mark.parametrize("owners", [None, np.array(["z", "z", "z"]), np.array(["a0", "", "n"])])
def test_unowned_test_rows_are_given_to_no_client(owners: np.ndarray | None) -> None:
    partition = partition_by_owner(np.arange(4) % 2, np.array(["b", "a", "b", "c"]), np.zeros(3, int), owners)
    assert partition.names == ("a", "b", "c")
    assert [partition.train_rows(k).tolist() for k in range(3)] == [[1], [0, 2], [3]]
    assert [len(partition.test_rows(k)) for k in range(3)] == [0, 0, 0]
    assert partition.notes
