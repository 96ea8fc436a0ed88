"""Moved: see `fedgraft.identity`."""

from fedgraft.identity import digest

__all__ = ["digest"]
