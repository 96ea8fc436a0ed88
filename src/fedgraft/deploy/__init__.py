"""A federation of machines: its folder, keys, nodes, server, and the rehearsal on one machine."""
