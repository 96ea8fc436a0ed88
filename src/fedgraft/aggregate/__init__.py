"""Aggregation: means, robust rules, merging, similarity mixing, server rules, codecs."""
