"""One small file per experiment of the literature."""
