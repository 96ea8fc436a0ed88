"""How changes become one: means, robust rules, similarity mixtures, server optimizers."""
