"""One run from a config or from objects to a folder with a model."""
