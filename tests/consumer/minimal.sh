#!/usr/bin/env bash
# minimal.sh: builds and installs the library alone, in build/minimal, as on a machine without CUDA, CLI11, HDF5 and
# liblzf, and then a project that uses it. Arguments go to CMake.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../setup.sh"
cd "$root"
build=build/minimal
missing=(-DCMAKE_DISABLE_FIND_PACKAGE_{CLI11,hdf5_serial,lzf,CUDAToolkit}=ON)
if command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache
fi
rm -rf $build
cmake -S . -B $build -G Ninja -DCMAKE_BUILD_TYPE=Release -DPINFLOW_CUDA=OFF -DPINFLOW_BUILD_TOOL=OFF \
    -DPINFLOW_BUILD_TESTS=OFF -DPINFLOW_BUILD_SAMPLES=OFF "${missing[@]}" "$@"
cmake --build $build
cmake --install $build --prefix $build/installed
cmake -S tests/consumer -B $build/consumer -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_PREFIX_PATH="$root/$build/installed" "${missing[@]}"
cmake --build $build/consumer
$build/consumer/consumer $build/made_by_consumer.npy
