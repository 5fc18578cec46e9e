#!/usr/bin/env bash
# gpu.sh [configure|build|test|memcheck|racecheck|bench]...
#
# Builds, tests and measures on a CUDA host, one that has no package registry too: what it lacks is expected below
# .gpu-deps/ in the repository's root (unpacked distribution packages). Phases are given as arguments; all of them without
# any. Each takes less than ten minutes, and can be run on its own after `configure build`. Settings, from the environment:
#   BUILD       the build folder (build/gpu)
#   DATA        where the large files are made and kept (BUILD/data)
#   ROWS        rows of 256 KiB of the measured file (32768, which is 8 GiB)
#   JOBS        parallel compilations (all cores)
#   ARCH        CMAKE_CUDA_ARCHITECTURES (90)
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
build=${BUILD:-$root/build/gpu}
data=${DATA:-$build/data}
rows=${ROWS:-32768}
jobs=${JOBS:-$(nproc)}
arch=${ARCH:-90}
deps=$root/.gpu-deps/usr
export PATH=$PATH:/usr/local/cuda/bin LC_ALL=C.UTF-8
if [ -d "$deps" ]; then
    export LD_LIBRARY_PATH=$deps/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
table=()
failures=0

say() {
    printf '== %s\n' "$*"
}

# run LIMIT COMMAND...: with a time limit; remembers a failure and goes on.
run() {
    local limit=$1 status=0
    shift
    say "$*"
    timeout --kill-after=10 "$limit" "$@" || status=$?
    if [ "$status" = 77 ]; then
        table+=("skipped     $*")
    elif [ "$status" != 0 ]; then
        failures=$((failures + 1))
        table+=("FAILED $status  $*")
        say "FAILED with status $status"
    fi
}

configure() {
    local options=(-DCMAKE_BUILD_TYPE=Release -DPINFLOW_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$arch")
    if [ -d "$deps" ]; then
        options+=(-DCMAKE_PREFIX_PATH="$deps")
    fi
    if command -v ninja >/dev/null; then
        options+=(-G Ninja)
    fi
    timeout 120 cmake -S "$root" -B "$build" "${options[@]}"
}

build() {
    timeout 580 cmake --build "$build" --parallel "$jobs"
}

run_tests() {
    run 240 stdbuf -oL -eL "$build/tests/cuda_test" --duration=true
    run 340 ctest --test-dir "$build" --output-on-failure --timeout 120 -j 4 -E '^cuda_test$'
}

# sanitize TOOL. Children that fault on purpose, and work that takes minutes under instrumentation, are left out.
sanitize() {
    local tool=$1 test before
    if ! command -v compute-sanitizer >/dev/null; then
        table+=("skipped     compute-sanitizer is not installed")
        return
    fi
    local options=(--tool "$tool" --error-exitcode 9 --print-limit 20)
    if [ "$tool" = memcheck ]; then
        options+=(--report-api-errors no)  # the tests ask for failing calls on purpose
    fi
    for test in cuda_test loader_test; do
        before=$failures
        run 280 compute-sanitizer "${options[@]}" "$build/tests/$test" --duration=true \
            '--test-case-exclude=cuda process*,*hundreds of megabytes*,*worked on at a time*,*500 times*'
        [ "$failures" != "$before" ] || table+=("clean       compute-sanitizer $tool $test")
    done
}

# measure NAME ARGUMENTS...: one run of `pinflow stream`, its figures into the table.
measure() {
    local name=$1 output
    shift
    say "pinflow stream $*"
    if ! output=$(timeout --kill-after=10 120 "$build/bin/pinflow" stream "$@" --json); then
        failures=$((failures + 1))
        table+=("FAILED      $name")
        return
    fi
    printf '%s\n' "$output"
    table+=("$(NAME=$name python3 -c '
import json, os, statistics, sys
r = json.loads(sys.stdin.read())
epochs = r["epoch_seconds"]
size = r["bytes"] / max(r["epochs"], 1) / 1e9
rest = [size / s for s in epochs[1:]] or [size / epochs[0]]
print("%-34s epoch 1 %6.1f  then %6.1f GB/s  pin %.2f s  %s: %s  digest %s" % (
    os.environ["NAME"], size / epochs[0], statistics.median(rest), r["pin_seconds"], r["route"], r["reason"], r["digest"]))
' <<<"$output")")
}

bench() {
    mkdir -p "$data"
    local file=$data/stream-$rows.npy
    if [ ! -e "$file" ]; then
        run 300 "$build/samples/make_npy" "$file" --rows "$rows" --row-bytes 262144
    fi
    cat "$file" >/dev/null  # hot
    run 200 "$build/tests/link_speed" "$file" >"$build/link_speed.txt"
    cat "$build/link_speed.txt"
    mapfile -t -O "${#table[@]}" table <"$build/link_speed.txt"
    measure "cuda sequential" "$file" --device cuda:0 --batch 64 --epochs 5
    measure "cuda shuffled" "$file" --device cuda:0 --batch 64 --epochs 5 --order shuffled
    measure "cuda sequential, staged" "$file" --device cuda:0 --batch 64 --epochs 3 --route staged
    measure "cuda shuffled, staged" "$file" --device cuda:0 --batch 64 --epochs 3 --route staged --order shuffled
    measure "host sequential" "$file" --device host --batch 64 --epochs 1
}

cd "$root"
phases=("$@")
if [ ${#phases[@]} = 0 ]; then
    phases=(configure build test memcheck racecheck bench)
fi
for phase in "${phases[@]}"; do
    case $phase in
    configure) configure ;;
    build) build ;;
    test) run_tests ;;
    memcheck | racecheck) sanitize "$phase" ;;
    bench) bench ;;
    *)
        printf 'gpu.sh: no phase is called %s\n' "$phase" >&2
        exit 2
        ;;
    esac
done

say "summary: $failures failed"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || true
date -u +%Y-%m-%d
printf '%s\n' "${table[@]+"${table[@]}"}"
[ "$failures" = 0 ]
