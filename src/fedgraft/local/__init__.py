"""How a client trains: the only training loop, its optimizers, corrections, schedules, evaluation."""
