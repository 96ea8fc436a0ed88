"""Decisions several owners take together: preflight, what a site gains, unlearning, sweeps, attack tables."""
