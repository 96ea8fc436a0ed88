"""Decisions that several data owners take together: preflight, gain by site, unlearning, sweeps, attack tables."""
