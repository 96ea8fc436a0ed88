"""How much each client counts: by examples, uniformly, by alignment of representations."""
