from tessera.tritonserver.vision import TritonPythonModel  # noqa: F401
