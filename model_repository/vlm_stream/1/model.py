from tessera.tritonserver.fronts import Stream as TritonPythonModel  # noqa: F401
