"""What the server does in a round: sample clients, collect and validate their responses, take the step."""
