#!/usr/bin/env bash
# gpu.sh [configure|build|test|memcheck|racecheck|initcheck|soak|bench]...
#
# Builds, tests and measures on a CUDA host. The host needs no package registry: missing distribution packages are
# expected, unpacked, below .gpu-deps/ in the repository's root. The arguments are phases; without arguments all of them
# run. Each is meant for less than ten minutes (seen with one H200 and 16 cores), but the time limits of some allow
# more. Each can run on its own after `configure build`. Settings, from the environment:
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
last=0

say() {
    printf '== %s\n' "$*"
}

# run LIMIT COMMAND...: with a time limit; counts a failure, puts the status into $last, and continues.
run() {
    local limit=$1 status=0
    shift
    say "$*"
    timeout --kill-after=10 "$limit" "$@" || status=$?
    last=$status
    if [ "$status" = 77 ]; then
        table+=("skipped     $*")
    elif [ "$status" != 0 ]; then
        failures=$((failures + 1))
        table+=("FAILED $status  $*")
        say "FAILED with status $status"
    fi
}

# configure FOLDER [OPTION...]
configure() {
    local folder=$1
    shift
    local options=(-DCMAKE_BUILD_TYPE=Release -DPINFLOW_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="$arch" "$@")
    if [ -d "$deps" ]; then
        options+=(-DCMAKE_PREFIX_PATH="$deps")
    fi
    if command -v ninja >/dev/null; then
        options+=(-G Ninja)
    fi
    timeout 120 cmake -S "$root" -B "$folder" "${options[@]}"
}

build() {
    timeout 580 cmake --build "$build" --parallel "$jobs"
}

run_tests() {
    run 240 stdbuf -oL -eL "$build/tests/cuda_test" --duration=true
    run 340 ctest --test-dir "$build" --output-on-failure --timeout 120 -j 4 -E '^cuda_test$'
}

# sanitize TOOL: runs tests that are built to do less work, as for the host's sanitizers. Left out: cuda_process_test,
# whose children fault on purpose; work that takes minutes under instrumentation; a test whose kernel must still run
# when its launch returns, because under the tool launches block; and tests that block a stream while they wait for
# another, because the tool waits for both. Under initcheck, also the suite "copies behind a blocked stream", because
# initcheck waits for the copy. Under racecheck, also two tests whose threads call at the same time: it loses track of a
# launch, and counts that as an error. It only looks for races among the threads of one block.
sanitize() {
    local tool=$1 test
    local left_out='cuda process*,*hundreds of megabytes*,*millions of samples*,*legacy default stream'
    if ! command -v compute-sanitizer >/dev/null; then
        table+=("skipped     compute-sanitizer is not installed")
        return
    fi
    local options=(--tool "$tool" --error-exitcode 9 --print-limit 20)
    if [ "$tool" = memcheck ]; then
        options+=(--report-api-errors no)  # the tests ask for failing calls on purpose
    fi
    if [ "$tool" = racecheck ]; then
        left_out+=',rows: calls from several threads*,rows: a synchronous call*'
    fi
    local blocks_a_stream='blocked stream'
    local -a surroundings=()
    if [ "$tool" = initcheck ]; then
        blocks_a_stream+=',copies behind a blocked stream'
        surroundings=(env PINFLOW_TEST_SINGLE_COPIES=1)  # it does not see what batch copies write
    fi
    # api_loader_test and api_rows_test run one source file at a time
    local tests=(rows/both_ways_test rows/gather_test rows/scatter_test rows/row_sizes_test rows/wrong_ids_test
        rows/reserve_test rows/threads_test rows_errors_test sort_rows_test staging_test cuda_test loader/batch_test
        loader/delivery_test loader/routes_test loader/settings_test loader/report_test loader/leases_test
        loader/row_sizes_test loader/fork_test loader_faults_test slots_data_test slots_test loader/digest_test
        stream_test buffer_test)
    configure "$build-small" -DCMAKE_CXX_FLAGS=-DPINFLOW_TEST_SANITIZED=1
    timeout 300 cmake --build "$build-small" --parallel "$jobs" --target api_loader_test api_rows_test \
        rows_errors_test sort_rows_test staging_test cuda_test loader_faults_test slots_data_test slots_test stream_test \
        buffer_test
    for test in "${tests[@]}"; do
        local program=$test source='*'
        if [[ $test == */* ]]; then
            program=api_${test%%/*}_test source="*/api/$test.cpp"
        fi
        run 280 "${surroundings[@]}" compute-sanitizer "${options[@]}" "$build-small/tests/$program" --duration=true \
            "--source-file=$source" "--test-case-exclude=$left_out" "--test-suite-exclude=$blocks_a_stream"
        [ "$last" != 0 ] || table+=("clean       compute-sanitizer $tool $test")
    done
}

# measure NAME ARGUMENTS...: runs `pinflow stream` once and adds its figures to the table. Sets $first and $rest to the
# GB/s of the first epoch and the median of the others, and $digest to one epoch's digest.
measure() {
    local name=$1 output
    shift
    say "pinflow stream $*"
    if ! output=$(timeout --kill-after=10 120 "$build/bin/pinflow" stream "$@" --json); then
        failures=$((failures + 1))
        table+=("FAILED      $name")
        first=0 rest=0 digest=none
        return
    fi
    printf '%s\n' "$output"
    read -r first rest digest < <(python3 -c '
import json, statistics, sys
r = json.loads(sys.stdin.read())
epochs = r["epoch_seconds"]
size = r["bytes"] / len(epochs) / 1e9
# the digest is the sum of N equal digests modulo 2^64; an odd N has an inverse, which gives that of one epoch
one = int(r["digest"], 16) * pow(len(epochs), -1, 2**64) % 2**64
print(size / epochs[0], size / statistics.median(epochs[1:] or epochs), "%016x" % one)
' <<<"$output")
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

# Runs a hundred processes that stream a little, four at a time: each must succeed with the same digest, and their
# locked and allocated memory must be freed.
soak() {
    mkdir -p "$data"
    local file=$data/soak.npy results=$build/soak.txt status=0 before after
    "$build/samples/make_npy" "$file" --rows 512 --row-bytes 262144 >/dev/null
    held_memory() {  # MiB, in all
        { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1
          awk '/^(Mlocked|Unevictable):/ { print $2 / 1024 }' /proc/meminfo; } | awk '{ sum += $1 } END { print int(sum) }'
    }
    before=$(held_memory)
    say "100 processes of pinflow stream"
    # the status of xargs tells whether each process succeeded, including its exit after the last line
    seq 100 | xargs -P 4 -I {} timeout --kill-after=5 60 "$build/bin/pinflow" stream "$file" --device cuda:0 \
        --batch 32 --order shuffled --seed {} --json >"$results" || status=$?
    after=$(held_memory)
    local digests
    digests=$(grep -o '"digest":"[0-9a-f]*"' "$results" | sort | uniq -c | xargs)
    table+=("100 processes: status $status, $digests; device, locked and unevictable MiB before $before, after $after")
    if [ "$status" != 0 ] || ! [[ $digests =~ ^100\ [^\ ]*$ ]] || [ "$after" -gt $((before + 16)) ]; then
        failures=$((failures + 1))
        table+=("FAILED      100 processes")
    fi
}

# expect NAME VALUE min|max BOUND
expect() {
    if awk -v value="$2" -v bound="$4" -v how="$3" \
        'BEGIN { exit !(value != "" && (how == "min" ? value + 0 >= bound : value + 0 <= bound)) }'; then
        table+=("met         $1: $2 ($3 $4)")
    else
        failures=$((failures + 1))
        table+=("FAILED      $1: ${2:-nothing} ($3 $4)")
    fi
}

# max_ratio FILE: the largest of a bench's ratios of a step to the longer of copy and consumer
max_ratio() {
    awk '/ratio to the longer/ && $NF > max { max = $NF } END { print max }' "$1"
}

bench() {
    mkdir -p "$data"
    local file=$data/stream-$rows.npy
    if [ ! -e "$file" ]; then
        run 300 "$build/samples/make_npy" "$file" --rows "$rows" --row-bytes 262144
    fi
    cat "$file" >/dev/null  # into the page cache
    run 200 "$build/tests/link_speed" "$file" >"$build/link_speed.txt"
    cat "$build/link_speed.txt"
    mapfile -t -O "${#table[@]}" table <"$build/link_speed.txt"
    run 100 "$build/tests/overlap" "$file" >"$build/overlap.txt"
    cat "$build/overlap.txt"
    mapfile -t -O "${#table[@]}" table <"$build/overlap.txt"
    expect "a kernel and the copy, ratio to the longer" "$(max_ratio "$build/overlap.txt")" max 1.05
    if [ -x "$build/tests/overlap_matmul" ]; then  # built if cuBLAS is found
        run 100 "$build/tests/overlap_matmul" "$file" >"$build/overlap_matmul.txt"
        cat "$build/overlap_matmul.txt"
        mapfile -t -O "${#table[@]}" table <"$build/overlap_matmul.txt"
        expect "a bf16 product and the copy, ratio to the longer" "$(max_ratio "$build/overlap_matmul.txt")" max 1.05
        local small=$data/small-rows.npy
        if [ ! -e "$small" ]; then
            run 100 "$build/samples/make_npy" "$small" --rows 1048576 --row-bytes 4096
        fi
        run 100 "$build/tests/overlap_matmul" "$small" >"$build/overlap_small.txt"
        cat "$build/overlap_small.txt"
        mapfile -t -O "${#table[@]}" table < <(sed 's/^/rows of 4 KiB, /' "$build/overlap_small.txt")
        expect "a bf16 product and kernels that gather, ratio to the longer" \
            "$(max_ratio "$build/overlap_small.txt")" max 1.05
    fi
    local link first=0 rest=0 digest=none expected
    link=$(awk '/^LINK/ { print $(NF - 1) }' "$build/link_speed.txt")
    measure "host sequential" "$file" --device host --batch 64 --epochs 1
    expected=$digest
    same_digest() {
        if [ "$digest" = "$expected" ]; then return; fi
        failures=$((failures + 1))
        table+=("FAILED      the digest is $digest, on the host $expected")
    }
    of_link() {
        awk -v x="$1" -v link="$link" 'BEGIN { printf "%.3f", x / link }'
    }
    measure "cuda sequential" "$file" --device cuda:0 --batch 64 --epochs 5
    same_digest
    expect "sequential, epoch 1, of LINK" "$(of_link "$first")" min 0.55
    expect "sequential, epochs 2 to 5, of LINK" "$(of_link "$rest")" min 0.97
    measure "cuda shuffled" "$file" --device cuda:0 --batch 64 --epochs 5 --order shuffled
    same_digest
    expect "shuffled, epochs 2 to 5, of LINK" "$(of_link "$rest")" min 0.95
    measure "cuda sequential, staged" "$file" --device cuda:0 --batch 64 --epochs 3 --route staged
    same_digest
    measure "cuda shuffled, staged" "$file" --device cuda:0 --batch 64 --epochs 3 --route staged --order shuffled
    same_digest
}

cd "$root"
phases=("$@")
if [ ${#phases[@]} = 0 ]; then
    phases=(configure build test memcheck racecheck initcheck soak bench)
fi
for phase in "${phases[@]}"; do
    case $phase in
    configure) configure "$build" ;;
    build) build ;;
    test) run_tests ;;
    memcheck | racecheck | initcheck) sanitize "$phase" ;;
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
