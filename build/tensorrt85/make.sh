#!/usr/bin/env bash
# Compiles, without a GPU, what go.sh runs on one: trtprobe, and Triton's TensorRT backend against TensorRT 8.5.3.
#   make.sh SOURCES WHEELS OUT
# SOURCES holds checkouts: TensorRT (NVIDIA, release/8.5), onnx-tensorrt (8.5-GA), rapidjson (Tencent), and of Triton's
# r24.10 tensorrt_backend, backend, core, common. WHEELS: those of libraries.py and nvidia-cuda-nvcc-cu11 (a header of it).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
sources=$(cd "$1" && pwd) wheels=$(cd "$2" && pwd)
mkdir -p "$3" && out=$(cd "$3" && pwd)
work=$out/work
mkdir -p "$work/link" "$work/objects" "$out/kit/backends/tensorrt"
cd "$work"
for wheel in "$wheels"/nvidia_cuda_*.whl; do unzip -qo "$wheel" '*/include/*'; done
for library in libnvinfer.so.8 libnvinfer_plugin.so.8 libnvonnxparser.so.8 libcudart.so.11.0; do
    wheel=$(ls "$wheels"/tensorrt-8.5.3.1-*.whl)
    [ $library = libcudart.so.11.0 ] && wheel=$(ls "$wheels"/nvidia_cuda_runtime_cu11-*.whl)
    unzip -qoj "$wheel" "*/$library" -d link && ln -sf $library "link/${library%%.so*}.so"
done
includes=(-I"$sources/TensorRT/include" -I"$sources/onnx-tensorrt" -Invidia/cuda_runtime/include -Invidia/cuda_nvcc/include)
flags=(-O2 -std=c++17 -Wno-deprecated-declarations "${includes[@]}")
link=(-Llink -lnvinfer -lcudart -lpthread -Wl,--allow-shlib-undefined)
g++ "${flags[@]}" -Wall "$here/trtprobe.cc" -o "$out/kit/trtprobe" "${link[@]}" -lnvonnxparser -lnvinfer_plugin

# The backend has its sources for TensorRT 8 still. They are of 8.6: 8.5 has no plans that carry host code.
rm -rf trt8 && cp -r "$sources/tensorrt_backend/src_trt8" trt8
sed -i -e 's/!runtime->get()->getEngineHostCodeAllowed()/false/' -e '/setEngineHostCodeAllowed/d' trt8/loader.cc
# In place of backend/src/kernel.cu, used only with gather_kernel_buffer_threshold above 0, which no config here has.
cat > trt8/gather.cc << 'END'
#include "kernel.h"
cudaError_t RunGatherKernel(const int8_t**, const size_t*, const size_t*, int8_t*, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
END
for folder in trt8 backend/include backend/src common/include core/include rapidjson/include; do
    case $folder in trt8) flags+=(-Itrt8) ;; *) flags+=(-I"$sources/$folder") ;; esac
done
flags+=(-fPIC -w -DTRITON_ENABLE_GPU=1 -DTRITON_ENABLE_CUDA_GRAPH=1 -DTRITON_ENABLE_STATS=1)
ls trt8/*.cc "$sources"/backend/src/backend_*.cc "$sources"/common/src/{async_work_queue,error,thread_pool}.cc |
    xargs -P "$(nproc)" -I{} sh -c 'file=$1; shift; g++ -c "$@" "$file" -o "objects/$(basename "$file").o"' _ {} "${flags[@]}"
g++ -shared -o "$out/kit/backends/tensorrt/libtriton_tensorrt.so" objects/*.o "${link[@]}" -lnvinfer_plugin \
    -Wl,--version-script=trt8/libtriton_tensorrt.ldscript
ls -l "$out/kit/trtprobe" "$out/kit/backends/tensorrt"
