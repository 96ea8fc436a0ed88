"""fedgraft beside real peers: the same work, each in an environment of its own."""
