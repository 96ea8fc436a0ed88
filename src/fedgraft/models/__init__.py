"""Networks, through transformers only."""
