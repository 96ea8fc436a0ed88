"""What may change, as one flat vector: spaces, sensitivity scores, masks, calibration, low rank."""
