#!/usr/bin/env bash
# Makes the archive that carried_server.sh unpacks on a machine without a package registry: site-packages for its Python
# (3.12, x86-64), of what the server and the load need and that machine's own Python lacks. About 42 MB, two minutes.
#   bash loadtest/carried_env.sh ARCHIVE.tar.xz
set -euo pipefail
archive=$(realpath "$1")
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wanted='numpy|tritonclient|llguidance|simplejpeg|nvidia-ml-py|fastapi|starlette|python-multipart|annotated-doc|opentelemetry-.*|googleapis-common-protos|uvicorn|httptools|pydantic|pydantic_core|annotated-types|typing-inspection|pypdfium2|mineru_vl_utils|httpx-retries|loguru'
platforms=()
for glibc in 2_17 2_24 2_27 2_28 2_31 2_34 2_35; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
sed -nE "s/\[grpc\]//; s/^(($wanted)==[^; ]+).*/\1/p" "$root/requirements.txt" > "$work/wanted.txt"
grep -h '^nvidia-pytriton==' "$root/requirements-tritonserver.txt" >> "$work/wanted.txt"
echo 'python-rapidjson' >> "$work/wanted.txt" # tritonclient's HTTP client imports it
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 -d "$work/wheels" -r "$work/wanted.txt"
mkdir "$work/site"
cd "$work/site"
for wheel in ../wheels/*.whl; do python3 -m zipfile -e "$wheel" .; done
find pytriton/tritonserver/python_backend_stubs -mindepth 1 -maxdepth 1 ! -name 3.12 -exec rm -r {} +
rm -f nvidia_pytriton.libs/libpython3-*.so.*  # of the stubs for other Pythons
find . -name tests -type d -prune -exec rm -r {} +
find . \( -name '*.so*' -o -name tritonserver -o -name triton_python_backend_stub \) -type f -exec chmod +x {} + # zipfile forgets it
find . -name '*.so' -size +6M -exec strip --strip-unneeded {} + 2>/dev/null || true
tar cf - . | xz -T0 -9e > "$archive"
ls -l "$archive"
