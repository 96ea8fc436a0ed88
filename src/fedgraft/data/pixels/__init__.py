"""Images: one store, one set of transforms."""
