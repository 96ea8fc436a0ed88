"""Engines carry out the requests of a run: in this process, in worker processes, batched, or on Flower."""
