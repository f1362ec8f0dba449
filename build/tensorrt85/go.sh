#!/usr/bin/env bash
# Plans of TensorRT 8.5.3 on a GPU machine without a package registry, in $TRT (/tmp/trt). docs/tensorrt.md says how.
#   go.sh make SOURCES WHEELS OUT   compile, on any machine, what the other steps run. SOURCES holds checkouts: TensorRT
#                            (NVIDIA, release/8.5), onnx-tensorrt (8.5-GA), rapidjson (Tencent), and of Triton's r24.10
#                            tensorrt_backend, backend, core, common. WHEELS: those of `plans.py pack` and
#                            nvidia-cuda-nvcc-cu11 (a header of it)
#   go.sh unpack FOLDER...   place carried pieces; a FOLDER's kit/ (trtprobe, Triton's backend, graphs) too
#   go.sh check              are the libraries whole?
#   go.sh graphs MODEL GRAPH...   export ahead what builds will need
#   go.sh start NAME...      build, detached; NAME is MODEL-TYPES[-TILES][_faster][_heuristic][_nocublas], with
#                            MODEL small (default checkpoint) or big (InternViT-300M), TYPES free, typed, half, plugin, tf32
#   go.sh poll               state of every build
#   go.sh stop [NAME...]     end those (or all) under way; their timing caches stay
#   go.sh finish             judge, time and list every plan, beside our own tower's times; logs, timing
#                            caches and small plans to $OUT
#   go.sh serve ENV NAME     NAME's plan inside tritonserver; ENV is the archive of loadtest/carried_server.sh
# $CORES (for taskset), $GPUS ("0 1": taken by turns), $LIMIT (seconds a build), $THREADS (of a build)
set -uo pipefail
root=${REPOSITORY:-$(cd "$(dirname "$0")/../.." && pwd)}
here=$root/build/tensorrt85
TRT=${TRT:-/tmp/trt}
work=$TRT/work
probe=${PROBE:-$TRT/kit/trtprobe}
gpus=(${GPUS:-0}) turn=0
mkdir -p "$work"
export CUDA_MODULE_LOADING=LAZY PYTHONUNBUFFERED=1 CUDA_CACHE_PATH=$TRT/jit CUDA_CACHE_MAXSIZE=2147483648

trt() { LD_LIBRARY_PATH=$TRT/lib "$probe" "$@"; }

of_model() { # MODEL: the options of the Python scripts that read a checkpoint
    case $1 in
        small) options=(--checkpoint "$root/build/default_model/checkpoint") ;;
        big) options=(--checkpoint "$root/loadtest/shapes/internvl3-8b-shape" --random-weights) ;;
        *) echo "go.sh: $1 is no model" >&2 && return 1 ;;
    esac
}

graphs() { # MODEL GRAPH...: exported once for all
    local folder=$TRT/kit/$1 options wanted=() name
    of_model "$1" || return 1
    shift
    mkdir -p "$folder"
    (
        flock 9
        for name; do [ -s "$folder/$name.onnx" ] || wanted+=("$name"); done
        [ ${#wanted[@]} = 0 ] && exit 0
        OMP_NUM_THREADS=8 python3 "$here/plans.py" graphs "${options[@]}" --out "$folder" "${wanted[@]}"
    ) 9> "$folder/.lock"
}

build() { # NAME: in the foreground, with its state in files
    local name=$1 spec=${1%%_*} flags=${1#"${1%%_*}"} options=(--tactics 27)
    local model=${spec%%-*} rest=${spec#*-}
    local types=${rest%%-*} graph=$rest mode=free
    case $types in
        half | plugin | typed) mode=typed ;;
        tf32) mode=tf32 graph=free${rest#tf32} ;;
    esac
    case $flags in *_nocublas*) options=(--tactics 24) ;; esac
    case $flags in *_faster*) options+=(--faster) ;; esac
    case $flags in *_heuristic*) options+=(--heuristic) ;; esac
    trap : TERM # `stop` means the probe, which keeps its timing cache; this shell still has to write the state
    echo "exporting" > "$work/$name.state"
    if graphs "$model" "$graph"; then
        echo "building" > "$work/$name.state"
        LD_LIBRARY_PATH=$TRT/lib timeout --foreground -k 30 "${LIMIT:-1200}" "$probe" build "$TRT/kit/$model/$graph.onnx" \
            "$work/$name.plan" "$mode" "${options[@]}" --tiles 1,8,32 --threads "${THREADS:-1}" \
            --cache "$work/$name.cache" --log "$work/$name.verbose"
        echo "ended with $? after $SECONDS s" > "$work/$name.state"
    else
        echo "ended: no graph" > "$work/$name.state"
    fi
}

ended() { case $(cat "$work/$1.state" 2> /dev/null) in ended*) ;; *) return 1 ;; esac; }

names() { for file in "$work"/*.state; do [ -e "$file" ] && basename "$file" .state; done; }

step=${1:?the first lines of go.sh say what it does}
shift
case $step in
make)
    set -euo pipefail
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
    ;;
unpack)
    mkdir -p "$TRT/lib"
    # A piece LIBRARY.NUMBER.xz is the library's 24 MiB (plans.CHUNK) of that number.
    find "$@" -name '*.xz' -print0 | xargs -0 -P "$(nproc)" -I{} bash -c '
        set -o pipefail
        piece=$(basename "$1" .xz) && xz -dc "$1" | dd of="$2/${piece%.*}" seek="${piece##*.}" bs=24M iflag=fullblock \
            conv=notrunc status=none' _ {} "$TRT/lib" || exit 1
    for folder; do
        [ -d "$folder/kit" ] && cp -r "$folder/kit" "$TRT/" && chmod +x "$TRT/kit/trtprobe"
    done
    ls "$TRT"
    ;;
check)
    (cd "$TRT/lib" && sha256sum --check --quiet "$TRT/kit/libs.sha256") || exit 1
    LD_LIBRARY_PATH=$TRT/lib ldd "$probe" | grep 'not found' && exit 1
    exit 0
    ;;
graphs) graphs "$@" ;;
start)
    cp "$here/go.sh" "$TRT/go.sh" # the repository may be written again while builds run
    export REPOSITORY=$root
    for name; do
        export CUDA_VISIBLE_DEVICES=${gpus[turn++ % ${#gpus[@]}]}
        echo "waiting" > "$work/$name.state"
        date +%s > "$work/$name.began"
        setsid nice -n 5 taskset -c "${CORES:-0-$(($(nproc) - 1))}" bash "$TRT/go.sh" build "$name" \
            > "$work/$name.log" 2>&1 < /dev/null &
        echo $! > "$work/$name.pid"
        echo "$name starts on GPU $CUDA_VISIBLE_DEVICES"
    done
    ;;
build) build "$1" ;;
poll)
    for name in $(names); do
        echo "== $name: $(cat "$work/$name.state") ($(($(date +%s) - $(cat "$work/$name.began"))) s since the start)"
        grep -hE 'PLAN|trtprobe:|TensorRT [01]|Error' "$work/$name.log" | cut -c1-200 | tail -3
        [ -e "$work/$name.verbose" ] || continue
        echo "   $(grep -c 'Autotuning format combination' "$work/$name.verbose") format combinations so far"
        tail -n 2 "$work/$name.verbose" | cut -c1-220
    done
    nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader 2> /dev/null
    ;;
stop)
    [ $# = 0 ] && set -- $(names)
    for name; do
        ended "$name" && continue
        kill -TERM -- "-$(cat "$work/$name.pid")"
        echo "$name is told to end"
    done
    for _ in $(seq 20); do
        busy=0
        for name; do ended "$name" || busy=1; done
        [ $busy = 0 ] && break
        sleep 1
    done
    ;;
finish)
    : "${OUT:=$TRT/out}"
    mkdir -p "$OUT"
    for name in $(names); do
        echo "== $name: $(cat "$work/$name.state")"
        grep -hE 'parsed|constrained|PLAN' "$work/$name.log"
        grep -E '^ *[0-9.]+ [0-3] |Autotuning|Timing Runner|Fastest|Time: ' "$work/$name.verbose" 2> /dev/null \
            | cut -c1-260 | tail -n 4000 > "$work/$name.short"
        plan=$work/$name.plan data=$TRT/kit/${name%%-*}
        [ -s "$plan" ] || continue
        trt run "$plan" "$data/tiles.u8" 38 "$work/$name.rows" && python3 "$here/plans.py" judge "$data" "$work/$name.rows"
        trt time "$plan" "$data/tiles.u8" 1,8,32 50
        trt layers "$plan" "$work/$name.layers.json"
    done 2>&1 | tee "$OUT/finish.txt"
    for model in $(names | cut -d- -f1 | sort -u); do
        of_model "$model" && echo "== our own tower, $model" &&
            python3 "$here/plans.py" times "${options[@]}" --reference "$TRT/kit/$model"
    done 2>&1 | tee -a "$OUT/finish.txt"
    tar -C "$work" -czf "$OUT/logs.tar.gz" $(cd "$work" && ls | grep -E '\.(log|short|state|cache|layers\.json)$')
    find "$work" -name 'small-*.plan' -size -15M | head -5 | xargs -r cp -t "$OUT" # for a later machine of this kind
    ls -la "$OUT"
    ;;
serve)
    : "${OUT:=$TRT/out}"
    mkdir -p "$OUT"
    export LD_LIBRARY_PATH=$TRT/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    bash "$root/loadtest/carried_server.sh" "$1" python "$here/plans.py" serve "$work/$2.plan" "$TRT/kit/${2%%-*}" \
        --backend "$TRT/kit/backends/tensorrt/libtriton_tensorrt.so" --out "$work" 2>&1 | tee "$OUT/serve.txt"
    status=${PIPESTATUS[0]}
    for log in "$work"/server-*.log; do tail -c 20000000 "$log" | gzip > "$OUT/$(basename "$log").gz"; done
    exit "$status"
    ;;
*) echo "go.sh: $step is no step; its first lines say what it does" >&2 && exit 2 ;;
esac
