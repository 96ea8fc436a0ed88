"""Evaluation of classifiers: counts, metrics with confidence intervals, comparisons over seeds. No drawing."""
