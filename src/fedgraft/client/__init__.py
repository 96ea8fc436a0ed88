"""What a client does with a request: authorize it, carry it out on its own data, answer."""
