"""Who may see what: secure aggregation and differential privacy."""
