"""The options of a run, and the door that builds objects from them."""
