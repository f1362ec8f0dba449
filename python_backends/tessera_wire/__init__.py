"""What the server's stages and its clients both need to ask a tritonserver: addresses, errors, tensors, gRPC.

The lowest room of the house: it imports neither the server (``tessera``) nor the SDK (``tessera_client``).
"""
