from tessera.tritonserver.vlm_unary import TritonPythonModel  # noqa: F401
