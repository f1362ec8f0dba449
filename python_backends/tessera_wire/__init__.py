"""What the server's stages and its clients both need to ask a tritonserver: addresses, errors, tensors, gRPC.

The lowest room of the house: it imports neither the server (``tessera``) nor the SDK (``tessera_client``).
"""

__version__ = "0.1.0"  # of all of Tessera
