#!/usr/bin/env bash
# For a machine without a package registry (our H200): builds an environment from a carried archive, which carried_env.sh
# makes, and runs a command in it. numpy is 1.26.4 there (the stub needs numpy 1); what the archive does not hold comes
# from the machine's own Python, but for what wants a newer numpy there and transformers would import.
#   bash loadtest/carried_server.sh ARCHIVE.tar.xz COMMAND...
set -euo pipefail
archive=$1
shift
env=${TMPDIR:-/tmp}/tessera-env
if [ ! -e "$env/.ready" ]; then
    base=$(python3 -c 'import site; print(site.getsitepackages()[0])')
    python3 -m venv --without-pip "$env"
    site=$("$env/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    tar -C "$site" -xf "$archive"
    echo "$base" > "$site/machine.pth"
    echo 'import sys; sys.modules.update(scipy=None, sklearn=None)' > "$site/numpy.pth"
    touch "$env/.ready"
fi
root=$(cd "$(dirname "$0")/.." && pwd)
export PATH="$env/bin:$PATH" PYTHONPATH="$root/python_backends:$root/clients"
exec "$@"
