"""Counts, scores and intervals. Nothing here draws."""
