"""The command ``tessera``: the one room above both the server and its clients."""
