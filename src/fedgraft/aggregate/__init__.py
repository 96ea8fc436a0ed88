"""How updates become one: means, robust rules, similarity mixtures, server optimizers."""
