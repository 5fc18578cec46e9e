#!/usr/bin/env bash
# gpu.sh [configure|build|test|memcheck|racecheck|soak|bench]...
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

# sanitize TOOL. Left out: children that fault on purpose, work that takes minutes under instrumentation, and a test of
# a kernel that is to be still running when its launch returns, which the tool does not allow.
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
            '--test-case-exclude=cuda process*,*hundreds of megabytes*,*worked on at a time*,*500 times*,*legacy default stream'
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

# A hundred processes that stream a little, four at a time: each ends well and with the same digest, and what they
# locked and allocated is gone.
soak() {
    mkdir -p "$data"
    local file=$data/soak.npy before after digests
    "$build/samples/make_npy" "$file" --rows 512 --row-bytes 262144 >/dev/null
    held_memory() {
        nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1
        awk '/^(Mlocked|Unevictable):/ { print $2 / 1024 }' /proc/meminfo
    }
    before=$(held_memory | xargs)
    say "100 processes of pinflow stream"
    digests=$(seq 100 | xargs -P 4 -I {} timeout --kill-after=5 60 "$build/bin/pinflow" stream "$file" --device cuda:0 \
        --batch 32 --order shuffled --seed {} --json | grep -o '"digest":"[0-9a-f]*"' | sort | uniq -c) || true
    after=$(held_memory | xargs)
    printf '%s\n' "$digests"
    table+=("100 processes: $(xargs <<<"$digests"); MiB of device memory, locked, unevictable: before $before, after $after")
    if [ "$(wc -l <<<"$digests")" != 1 ] || [ "$(awk '{ print $1 }' <<<"$digests")" != 100 ]; then
        failures=$((failures + 1))
        table+=("FAILED      100 processes")
    fi
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
    run 100 "$build/tests/overlap" "$file" >"$build/overlap.txt"
    cat "$build/overlap.txt"
    mapfile -t -O "${#table[@]}" table <"$build/overlap.txt"
    measure "cuda sequential" "$file" --device cuda:0 --batch 64 --epochs 5
    measure "cuda shuffled" "$file" --device cuda:0 --batch 64 --epochs 5 --order shuffled
    measure "cuda sequential, staged" "$file" --device cuda:0 --batch 64 --epochs 3 --route staged
    measure "cuda shuffled, staged" "$file" --device cuda:0 --batch 64 --epochs 3 --route staged --order shuffled
    measure "host sequential" "$file" --device host --batch 64 --epochs 1
}

cd "$root"
phases=("$@")
if [ ${#phases[@]} = 0 ]; then
    phases=(configure build test memcheck racecheck soak bench)
fi
for phase in "${phases[@]}"; do
    case $phase in
    configure) configure ;;
    build) build ;;
    test) run_tests ;;
    memcheck | racecheck) sanitize "$phase" ;;
    soak) soak ;;
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
