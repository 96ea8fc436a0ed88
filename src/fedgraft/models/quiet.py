"""Keep `transformers` quiet, off the shared random generator, and from failing over a torchvision of another build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import torch

from fedgraft.core.errors import FedgraftError


def require_matching_torchvision() -> None:
    """Raise unless torchvision is absent or loads beside this torch: `transformers` imports it where it is installed.

    A build for another torch, or for CUDA beside a CPU build, fails with a message about an operator.
    """
    if find_spec("torchvision") is None:
        return
    try:
        import_module("torchvision")
    except (RuntimeError, ImportError, OSError, AttributeError) as error:
        installed = version("torchvision")
        raise FedgraftError(
            "E-MODELS-TORCHVISION",
            f"torchvision {installed} is not built for torch {torch.__version__} and stops transformers ({error})",
            "install the build of this torch, from where torch came from, or remove it, for fedgraft does without: "
            "pip uninstall torchvision",
            torchvision=installed,
            torch=torch.__version__,
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and notes on unused weights; the caller checks what matters and raises it."""
    require_matching_torchvision()
    from transformers.utils import logging

    level = logging.get_verbosity()
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if had_progress_bar:
            logging.enable_progress_bar()


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Let code that uses the shared CPU generator draw from `seed`; the generator's state is restored."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
