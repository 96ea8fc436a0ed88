"""The studio: a local page on which people look at runs and federations, and start runs if they may."""
