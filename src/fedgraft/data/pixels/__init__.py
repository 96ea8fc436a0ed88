"""Images: decoding, pixel rules, cached pixels, transforms and augmentations."""
