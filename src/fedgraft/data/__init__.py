"""Where images come from and how they are dealt to clients."""
