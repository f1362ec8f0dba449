from tessera.tritonserver.vlm_stream import TritonPythonModel  # noqa: F401
