from tessera.preprocess.tritonserver_model import TritonPythonModel  # noqa: F401
