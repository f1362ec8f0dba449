# make demo    the whole thing on real pictures, from a bare clone
# make serve   keep the server up
# make test    everything that runs without a GPU
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ONNX := model_repository/vision_encoder/1/model.onnx
CHECKPOINT := build/default_model/checkpoint
TYPED := .cache/vision_tensorrt.onnx

.PHONY: env demo serve test lint types test-faults test-gpu soak fuzz bench-cpu bench-serve bench-dispatch bench-remote-vision bench-preprocess bench-kernels bench-engine bench-vision gpu-sharing bench-recall parity tensorrt record report clean

env: $(VENV)/.ready

$(VENV)/.ready: requirements.txt requirements-tritonserver.txt requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-tritonserver.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

# what only the tests need, so that the demo does not wait for it
$(VENV)/.tensorrt: $(VENV)/.ready requirements-tensorrt.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-tensorrt.txt
	touch $@

$(ONNX): $(VENV)/.ready build/export_vision_onnx.py $(CHECKPOINT)/model.safetensors
	$(PY) build/export_vision_onnx.py --checkpoint $(CHECKPOINT) --out $@

demo: $(ONNX)
	$(PY) build/demo.py

serve: $(ONNX)
	$(VENV)/bin/tessera serve

test: lint types $(ONNX) $(VENV)/.tensorrt
	$(PY) -m pytest

# the kills, the disconnects and the bad input alone
test-faults: $(ONNX)
	$(PY) -m pytest -m faults

# 30 minutes of mixed load; memory must stay flat and every request be answered
soak: $(ONNX)
	$(PY) loadtest/soak.py $(if $(MINUTES),--minutes $(MINUTES))

# 10 minutes of new mutated inputs against a running server
fuzz: $(ONNX)
	$(PY) loadtest/fuzz.py

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

# on a machine with a GPU; these tests skip themselves elsewhere
test-gpu: $(ONNX)
	$(PY) -m pytest -m gpu

bench-cpu: $(ONNX)
	$(PY) loadtest/bench_cpu.py

# the engine alone on one GPU, ceilings beside the figures; ENGINE="--parts decode --quick" for other settings
bench-engine: $(VENV)/.ready
	$(PY) loadtest/bench_engine.py $(ENGINE)

# the vision encoder alone on one GPU, against transformers; VISION="--profile" for its kernels
bench-vision: $(VENV)/.ready
	$(PY) loadtest/bench_vision.py $(VISION)

# a standard workload through the server on a GPU; W=W4a, SERVE="--gpus 0,1" for other settings
bench-serve: $(VENV)/.ready
	$(PY) loadtest/bench_serve.py --workloads $(or $(W),W1) $(SERVE)

# sizes of the vision stage's forwards and sending groups, W1 through a server of each; DISPATCH="--gpu 0 ..." for a GPU
bench-dispatch: $(ONNX)
	$(PY) loadtest/bench_dispatch.py $(DISPATCH)

# Nagle's algorithm on small messages, and the vision stage on another server
bench-remote-vision: $(ONNX)
	$(PY) loadtest/bench_remote_vision.py

# JPEG bytes to tiles: against Pillow, big ones on the GPU (if there is one), and the stage alone in the real server;
# STAGE="--instances 4" for other settings of the last
bench-preprocess: $(VENV)/.ready
	$(PY) loadtest/bench_preprocess.py
	$(PY) loadtest/bench_gpu_preprocess.py
	$(PY) loadtest/bench_preprocess_stage.py $(STAGE)

# the triton kernels one by one on a GPU
bench-kernels: $(VENV)/.ready
	$(PY) loadtest/bench_kernels.py
	$(PY) loadtest/bench_attention.py

# what two processes lose that share one GPU
gpu-sharing: $(VENV)/.ready
	$(PY) loadtest/gpu_sharing.py

# recall of the held-out set through the ensemble; N=300 for a part of it, RECALL="..." for other settings
bench-recall: $(ONNX)
	$(PY) loadtest/bench_recall.py $(if $(N),--limit $(N)) $(RECALL)

# greedy tokens against transformers on 200 held-out pictures
parity: $(ONNX)
	$(PY) loadtest/parity.py

# the vision graph for TensorRT, judged on the CPU and compiled ahead of time; CHECKPOINT=DIR, EXPORT="--quantize int8"
tensorrt: $(VENV)/.tensorrt
	$(PY) build/export_vision_onnx.py --checkpoint $(CHECKPOINT) --target tensorrt --out $(TYPED) $(EXPORT)
	$(PY) build/check_export.py --checkpoint $(CHECKPOINT) --onnx $(TYPED)
	$(PY) build/build_vision_plan.py --onnx $(TYPED) --out $(TYPED:.onnx=.engine) --compute-capability 8.9

report: $(VENV)/.ready
	$(PY) loadtest/report.py

clean:
	rm -rf $(VENV) $(ONNX)

# make record BENCH=bench-cpu: runs a benchmark and keeps its figures
record: $(ONNX)
	$(MAKE) --no-print-directory $(BENCH) | $(PY) loadtest/record.py
	$(PY) loadtest/report.py
