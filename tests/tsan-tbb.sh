#!/usr/bin/env bash
# Builds an instrumented oneTBB from the distribution's source package, for the tsan preset: ThreadSanitizer cannot see
# the synchronisation inside the packaged library and would report races that are none. Takes half a minute once; the
# result stays in build/tsan-tbb. Fetching the source needs no root: apt works in a private folder, and the machine's
# sources stay as they are. Only installing missing packages needs root.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

need_packages clang-19 libclang-rt-19-dev cmake ninja-build libtbb-dev dpkg-dev
prefix=$root/build/tsan-tbb
compiler=clang++-19
packaged=$(dpkg-query -W -f '${Version}' libtbb-dev)
stamp="oneTBB $packaged, $($compiler --version | head -n 1)"
if [ "$(cat "$prefix/stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
say "building an instrumented oneTBB ($packaged) for ThreadSanitizer"

work=$root/build/tsan-tbb-work
rm -rf "$prefix" "$work"
fetch_source libtbb-dev "$packaged" "$work"

# Without its own allocator: malloc is the one that the sanitizer watches.
cmake -G Ninja -S "$(echo "$work"/source/*/)" -B "$work/build" --log-level=WARNING \
    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_COMPILER="$compiler" -DCMAKE_INSTALL_PREFIX="$prefix" \
    -DCMAKE_INSTALL_LIBDIR=lib -DCMAKE_CXX_FLAGS="-fsanitize=thread -w" -DTBB_STRICT=OFF -DTBB_TEST=OFF \
    -DTBBMALLOC_BUILD=OFF -DTBB_DISABLE_HWLOC_AUTOMATIC_SEARCH=ON
cmake --build "$work/build"
cmake --install "$work/build" >/dev/null
rm -rf "$work"
echo "$stamp" >"$prefix/stamp"
