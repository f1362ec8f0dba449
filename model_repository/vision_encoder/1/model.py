from tessera.vision.tritonserver_model import TritonPythonModel  # noqa: F401
