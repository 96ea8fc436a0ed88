"""Secure aggregation: the server opens only the sum (Bonawitz et al. 2017; Bell et al. 2020)."""
