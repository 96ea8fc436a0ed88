"""Clients on other machines, through Flower."""
