"""`tessera serve`: finds tritonserver, runs it on a model repository, and leaves nothing behind."""
