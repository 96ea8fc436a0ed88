"""The foundation of all other rooms: errors, messages, state, randomness, files, the edit space."""
