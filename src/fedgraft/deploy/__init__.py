"""A federation of machines: folder, keys, nodes, server, local rehearsal."""
