"""The consortium's thresholds for releasing a model: `release.toml`, agreed before anybody sees the figures."""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedgraft.core.errors import FedgraftError

EXAMPLE = """\
# What a model must keep to before it leaves the consortium. Every line may be left out; these are the defaults.
membership_auc = 0.6       # chance that a training image looks more like one than a test image does; 0.5 is guessing
found_at_one_percent = 0.1 # share of the training images found at a false alarm rate of 1 %
memorised = 0.3            # accuracy on training images of rare classes minus that on test images
verified_log = true        # the signed log of the rounds must match the folder
smallest_site = 0          # least training images of a site
# epsilon = 8.0            # where the run must be private: at most this, for its unit (privacy.dp.unit)
# gain = 0.0               # where `fedgraft worth` was run: no site may lose more than this share of its metric
"""


class ReleaseRules(BaseModel):
    """Thresholds; None means that nothing is required."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    membership_auc: float | None = Field(0.6, ge=0.5, le=1)
    found_at_one_percent: float | None = Field(0.1, ge=0, le=1)
    memorised: float | None = Field(0.3, ge=0, le=1)
    verified_log: bool = True
    smallest_site: int = Field(0, ge=0)
    epsilon: float | None = Field(None, gt=0)
    gain: float | None = Field(None, ge=-1, le=1)


def read_rules(path: Path | None) -> ReleaseRules:
    """Return the rules of a file, or the defaults without one; one sentence about the first thing that is wrong."""
    if path is None:
        return ReleaseRules()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FedgraftError(
            "E-CONSORTIUM-RELEASE-RULES", f"{path} cannot be read ({error.strerror})", "name a file", path=str(path)
        ) from None
    except ValueError as error:
        raise FedgraftError(
            "E-CONSORTIUM-RELEASE-RULES", f"{path} is not valid TOML: {error}", "see docs/release.md", path=str(path)
        ) from None
    try:
        return ReleaseRules.model_validate(table)
    except ValidationError as error:
        mistake = error.errors()[0]
        name = ".".join(map(str, mistake["loc"]))
        raise FedgraftError(
            "E-CONSORTIUM-RELEASE-RULES",
            f"{path}, {name}: {mistake['msg']}",
            f"there are {', '.join(ReleaseRules.model_fields)}",
            path=str(path),
            rule=name,
        ) from None
