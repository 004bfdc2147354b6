"""FedNoRo for a Flower app of your own: a strategy, and functions for the client."""
