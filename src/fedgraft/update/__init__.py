"""What crosses the wire and who may see it: codecs, screening, secure sum, privacy."""
