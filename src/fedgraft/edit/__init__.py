"""Trainables and edits: dense, sparse and low rank; sensitivity scores, masks, calibration, task vectors."""
