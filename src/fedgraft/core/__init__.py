"""What every other folder stands on: errors, messages, state, randomness, files, the space of weights."""
