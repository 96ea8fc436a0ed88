"""When the server steps: after every round, or whenever a number of answers is there (FedBuff, Nguyen et al., 2022).

In a synchronous round all clients train the same model, and the server waits for them. With a buffer it steps as soon
as `size` answers are there, whichever clients they come from and whichever model they began with; a client that is
slower than the others answers later, and its update counts less the more steps the server has taken meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from fedgraft.core.capabilities import NOTHING, Capabilities, Capability
from fedgraft.core.errors import FedgraftError

if TYPE_CHECKING:
    from fedgraft.algorithms.algorithm import Algorithm


@dataclass(frozen=True)
class SynchronousRounds:
    """The server waits for its cohort: every update of a step began with the model that the step changes."""

    name: ClassVar[str] = "synchronous rounds"
    instead: ClassVar[str] = ""
    requires: ClassVar[Capabilities] = NOTHING
    provides: ClassVar[Capabilities] = frozenset({Capability.SAME_START})


@dataclass(frozen=True)
class BufferedRounds:
    """The server steps whenever `size` answers are there.

    An update that began with a model of `staleness` steps ago is multiplied by (1 + staleness) ** -exponent.
    """

    size: int
    """Answers of a step, at most one of each client."""
    exponent: float = 0.5
    """0: stale updates count in full."""
    name: ClassVar[str] = "rounds.kind='buffered'"
    instead: ClassVar[str] = "rounds.kind='synchronous'"
    requires: ClassVar[Capabilities] = frozenset(
        {
            Capability.COMMON_MODEL,
            Capability.EXCHANGE,
            Capability.FIXED_COORDINATES,
            Capability.AVERAGED_UPDATES,
            Capability.SEPARATE_CLIENTS,
        }
    )
    provides: ClassVar[Capabilities] = NOTHING

    def __post_init__(self) -> None:
        if self.size < 1 or not self.exponent >= 0:
            raise FedgraftError(
                "E-ALGORITHM-BUFFER",
                f"a buffer of {self.size} answers with the exponent {self.exponent} cannot be",
                "give a size of at least 1 and an exponent of at least 0",
                size=self.size,
                exponent=self.exponent,
            )

    def discount(self, staleness: int) -> float:
        """Return the factor on an update that began with the model of so many steps ago; 1 for the present model."""
        return float((1 + staleness) ** -self.exponent)


Rounds = SynchronousRounds | BufferedRounds
SYNCHRONOUS = SynchronousRounds()


def buffered(algorithm: Algorithm, size: int, exponent: float = 0.5) -> Algorithm:
    """Return the algorithm with a server that steps whenever `size` answers are there.

    A stale update is multiplied by (1 + staleness) ** -exponent. An algorithm that cannot work with stale updates is
    refused.
    """
    return replace(algorithm, rounds=BufferedRounds(size, exponent))
