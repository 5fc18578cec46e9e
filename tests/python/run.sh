#!/usr/bin/env bash
# Installs the Python package with pip and tests it: the unit tests, ten seconds of comparisons with numpy, the samples,
# and mypy --strict on the package and the samples. With --wheel, also a repaired wheel, in an environment with numpy
# only. Exits with 77 if no Python package index can be reached. PYTHON names the interpreter (python3);
# CUDA_ARCHITECTURES the compute capabilities to build for (90; for the wheel those of samples/wheel.sh).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../setup.sh"
cd "$root"
python=${PYTHON:-python3}
work=$root/build/python

need_build_packages
need_packages python3-venv
rm -rf "$work"
mkdir -p "$work"
"$python" -m venv "$work/installed"
if ! "$work/installed/bin/pip" download --quiet --no-deps --dest "$work/index" nanobind scikit-build-core; then
    say "skipped: no Python package index can be reached"
    exit 77
fi

# the compiler by the name that CMake finds itself, so that ccache knows what was compiled for the C++ tests
export CC=cc CXX=c++
if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
fi

check() {
    local venv=$1
    (cd tests/python && "$venv/bin/python" -m unittest test_pinflow test_arguments test_cuda test_load test_train test_embedding)
    "$venv/bin/python" tests/python/differential.py --seconds 10
    "$venv/bin/python" samples/python/train_digits.py samples/data
    "$venv/bin/python" samples/python/resume.py
    "$venv/bin/python" samples/python/embeddings.py
}

say "pip install ."
CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES:-90}" "$work/installed/bin/pip" install --quiet .
"$work/installed/bin/pip" install --quiet numpy mypy h5py safetensors
check "$work/installed"
"$work/installed/bin/mypy" --strict -p pinflow
"$work/installed/bin/mypy" --strict samples/python/*.py

[ "${1:-}" = --wheel ] || exit 0
say "the wheel"
samples/wheel.sh "$work/dist"
"$python" -m venv "$work/bare"
"$work/bare/bin/pip" install --quiet numpy "$work"/dist/pinflow-*.whl
# no Python package but numpy is installed beside the wheel; shared libraries of this machine can still be found
check "$work/bare"
