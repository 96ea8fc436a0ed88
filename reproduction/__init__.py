"""Experiments of the source documents and the six questions, outside the package: `make reproduce NAME=...`."""
