"""The engine for clients on other machines, on Flower."""
