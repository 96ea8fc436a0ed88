"""Local training: the only training loop, losses, optimizers, corrections, schedules."""
