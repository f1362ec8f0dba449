from tessera.tritonserver.fronts import Unary as TritonPythonModel  # noqa: F401
