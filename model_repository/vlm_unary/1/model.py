from tessera.tritonserver.fronts import TritonPythonModel  # noqa: F401
