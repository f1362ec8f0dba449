"""The seam between the clients and the network: ``base`` is the contract, each other file one way to keep it."""
