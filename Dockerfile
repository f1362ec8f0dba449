# syntax=docker/dockerfile:1
# Three images: `server`, on NVIDIA's tritonserver 24.10 (tritonserver 2.51, Python 3.10), `plan`, which builds the
# TensorRT plan where it will run (the same release's TensorRT, 10.5), and `loadtest` (Locust).
# See docker-compose.yml for how they are run.

FROM nvcr.io/nvidia/tritonserver:24.10-py3 AS server
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONPATH=/opt/tessera/python_backends:/opt/tessera/clients \
    XDG_CACHE_HOME=/tmp/cache \
    TESSERA_CACHE=/tmp/cache/tessera \
    TRITON_CACHE_DIR=/tmp/cache/triton
WORKDIR /opt/tessera
COPY deploy/requirements-container.txt deploy/
RUN python3 -m pip install --no-cache-dir --disable-pip-version-check -r deploy/requirements-container.txt
COPY python_backends/ python_backends/
COPY clients/ clients/
# tritonserver gives a stage that gets no processor time one second, and crashes afterwards: patience.py says how.
RUN python3 -m tessera.launcher.installation /opt/tritonserver/backends/python/libtriton_python.so
COPY build/vision/export_graph.py build/vision/
COPY build/default_model/checkpoint/ build/default_model/checkpoint/
COPY build/document_model/checkpoint/ build/document_model/checkpoint/
COPY model_repository/ model_repository/
# The graph for the plan is made from the checkpoint. Everything belongs to root, so that the server, which is not root,
# cannot change its models. The plan lies in a volume, which the image `plan` fills; without one there
# is an empty file, for tritonserver complains of a link to nothing.
RUN python3 build/vision/export_graph.py --checkpoint build/default_model/checkpoint --target tensorrt \
        --out vision_tensorrt.onnx \
    && mkdir plan && touch plan/model.plan \
    && ln -s /opt/tessera/plan/model.plan model_repository/vision_encoder/1/model.plan \
    && chmod -R a+rX,go-w /opt/tessera
USER 1000:1000
EXPOSE 8000 8001 8002 8003 9000
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 \
    CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8003/healthz', timeout=4)"]
STOPSIGNAL SIGTERM
# In place of NVIDIA's entry point: the launcher starts tritonserver, watches its stages and cleans up after it. In a
# container it listens on all addresses; which of them the host publishes is for docker-compose.yml to say.
ENTRYPOINT ["python3", "-m", "tessera.launcher.cli"]
CMD ["--host", "0.0.0.0", "--model-repository", "/opt/tessera/model_repository", "--log", "/tmp/tritonserver.log", "--verbose"]

FROM nvcr.io/nvidia/tensorrt:24.10-py3 AS plan
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /opt/tessera
COPY build/vision/build_plan.py build/vision/
COPY --from=server /opt/tessera/vision_tensorrt.onnx ./
# A new volume takes its owner from here.
RUN install -d -o 1000 -g 1000 plan
USER 1000:1000
ENTRYPOINT ["python3", "build/vision/build_plan.py", "--onnx", "vision_tensorrt.onnx"]
CMD ["--out", "plan/model.plan", "--timing-cache", "plan/timing"]

FROM python:3.11.10-slim-bookworm AS loadtest
ENV PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONPATH=/opt/tessera/clients:/opt/tessera/python_backends
WORKDIR /opt/tessera
COPY requirements.txt requirements-loadtest.txt ./
# Of the server's pins only what the client and the pictures need.
RUN grep -E '^(numpy|opencv-python-headless|protobuf|httpx|tritonclient\[grpc\])==' requirements.txt > requirements-client.txt \
    && pip install --no-cache-dir --disable-pip-version-check -r requirements-client.txt -r requirements-loadtest.txt
COPY python_backends/tessera_wire/ python_backends/tessera_wire/
COPY clients/ clients/
COPY loadtest/locustfile.py loadtest/workloads.py loadtest/targets.py \
    loadtest/open_loop.py loadtest/closed_loop.py loadtest/counting.py loadtest/
USER 1000:1000
EXPOSE 8089
ENTRYPOINT ["locust", "-f", "loadtest/locustfile.py"]
