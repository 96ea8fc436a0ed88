"""Moved: see `fedgraft.core.network_digest`."""

from fedgraft.core.network_digest import digest

__all__ = ["digest"]
