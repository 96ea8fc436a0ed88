"""The experiments of the source documents and the six questions: presets, statistics, verdicts, pages."""
