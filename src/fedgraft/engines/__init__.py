"""Where orders are carried out: in this process, in a pool, on Flower."""
