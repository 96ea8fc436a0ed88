"""Keep `transformers` from writing to the screen and from drawing on the shared random generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and notes on unused weights; the caller checks what matters and raises it."""
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
