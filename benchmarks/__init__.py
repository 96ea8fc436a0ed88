"""Measurements: ratios taken side by side in one run. `make bench` runs them all, `make reliability` the fault checks."""
