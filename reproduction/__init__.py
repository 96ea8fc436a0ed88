"""The experiments of the source documents: presets, claims, studies, pages."""
