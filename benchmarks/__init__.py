"""Measurements: ratios taken side by side in one run. `make bench` runs them, `make reliability` the fault checks."""
