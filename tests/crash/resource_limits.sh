#!/usr/bin/env bash
# resource_limits.sh PINFLOW [STEPS] [MODE...]
#
# Runs `pinflow inspect`, `stream` and `convert` of a small corpus under limits that are swept in STEPS steps (50). Each
# run must end with exit status 0 and the result of a run without limits, or with 1 and one line that begins
# "pinflow: error: ": no signal, no other line. The result is what `inspect` prints, the digest of `stream`, or the file
# that `convert` writes. `inspect` may also print that there is no memory to map the file.
#   memory       a memory cgroup of version 1, from 256 down to 16 MiB; at each step also inputs that need more, whose
#                results are compared with the first that was printed
#   address      ulimit -v, from the lowest limit at which `--version` runs up to 512 MiB more
#   descriptors  ulimit -n, from the lowest limit at which `--version` runs
#   locked       ulimit -l, from 0 KiB
#   processes    a pids cgroup of version 1, from 1
# Without a MODE, all modes run. A mode is skipped with a message if its cgroup cannot be made here.
set -uo pipefail

pinflow=$(realpath -- "${1:?usage: resource_limits.sh PINFLOW [STEPS] [MODE...]}")
steps=${2:-50}
modes=("${@:3}")
[ ${#modes[@]} -gt 0 ] || modes=(memory address descriptors locked processes)
folder=$(realpath -- "$(mktemp -d "${TMPDIR:-/tmp}/resource-limits.XXXXXX")")
group=
cleanup() {
    if [ -n "$group" ]; then rmdir "$group" 2>/dev/null; fi
    rm -rf "$folder"
}
trap cleanup EXIT
cd "$folder" || exit 1
mkdir out expected

exit_with() {
    echo "resource_limits.sh: $1" >&2
    exit 1
}

# ---- what is read ----------------------------------------------------------------------------------------------------

# npy_header DESCR SHAPE: 118 characters (0x76) after the magic, the version and the header's length
npy_header() {
    printf '\x93NUMPY\x01\x00\x76\x00%-117s\n' "{'descr': '$1', 'fortran_order': False, 'shape': $2, }"
}
{ npy_header '<f4' '(16384, 256)' && head -c $((16 << 20)) /dev/urandom; } >a.npy
{
    printf '\x93NUMPY\x01\x00\x76\x00%-117s\n' "{'descr': '<f4', 'fortran_order': True, 'shape': (2048, 1024), }"
    head -c $((8 << 20)) /dev/urandom
} >fortran.npy
corpus=(a.npy fortran.npy)
for file in stored.npz tensors.safetensors; do
    "$pinflow" convert a.npy "$file" >/dev/null || exit_with "cannot make $file"
    corpus+=("$file")
done
targets=(npy npz safetensors)
if "$pinflow" convert a.npy contiguous.h5 >/dev/null 2>&1; then
    "$pinflow" convert a.npy chunked.h5 --deflate 1 >/dev/null
    corpus+=(contiguous.h5 chunked.h5)
    targets+=(h5)
fi
has_python=false
if /usr/bin/python3 -c 'import zipfile' 2>/dev/null; then
    has_python=true
    /usr/bin/python3 -c 'import zipfile
with zipfile.ZipFile("deflated.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive: archive.write("a.npy")'
    corpus+=(deflated.npz)
fi

# Inputs that need more than 256 MiB with the arguments that sweep_memory gives.
make_large() {
    { npy_header '<u4' '(65536, 1024)' && head -c $((256 << 20)) /dev/zero; } >large.npy
    $has_python || return
    /usr/bin/python3 - <<'PYTHON'
import json, zipfile
header = open("a.npy", "rb").read(128).replace(b"'<f4'", b"'|u1'").replace(b"(16384, 256)", b"(3145728, 1024)")
header = header[:127].rstrip().ljust(127)[:127] + b"\n"
with zipfile.ZipFile("zeros.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
    with archive.open("a.npy", "w", force_zip64=True) as member:
        member.write(header)
        for _ in range(3072):
            member.write(bytes(1 << 20))
def write(name, entries, data_bytes):
    text = json.dumps(entries).encode()
    with open(name, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + bytes(data_bytes))
tensor = {"a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
write("metadata.safetensors", {"__metadata__": {str(i): "v" * 1000 for i in range(90000)}, **tensor}, 64)
write("names.safetensors",
      {str(i): {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(1000000)}, 4000000)
PYTHON
}

# ---- running it ------------------------------------------------------------------------------------------------------

runs=0 refused=0 failures=0
declare -A digests=()  # of streams, from the first run of each; other results of first runs are in expected/
# Called in the subshell that becomes the tool.
# shellcheck disable=SC2317
limit() { :; }

digest_of() { grep -o '"digest":"[0-9a-f]*"' "$1"; }

# is_right ARGUMENTS...: whether the result equals that of the first run of its kind. The first run sets it. The corpus
# runs without limits first.
is_right() {
    local key=$2 expected
    case $1 in
    inspect)
        expected=expected/$2.inspected
        [ -e "$expected" ] || cp stdout "$expected"
        if grep -q '^mappable  no: cannot map .*: \(Cannot allocate memory; \|`ulimit -v` leaves \)' stdout; then
            cmp -s <(grep -v '^mappable  ' stdout) <(grep -v '^mappable  ' "$expected")
        else
            cmp -s stdout "$expected"
        fi
        ;;
    stream)
        if [[ $* == *'--epochs 2'* ]]; then key+=' twice'; fi
        digests[$key]=${digests[$key]:-$(digest_of stdout)}
        [ "$(digest_of stdout)" = "${digests[$key]}" ]
        ;;
    convert)
        expected=expected/$2.$(basename -- "$3")
        [ -e "$expected" ] || cp "$3" "$expected"
        cmp -s "$3" "$expected" && return
        # a file with other bytes is right if its arrays have the same digest
        "$pinflow" stream "$3" --device host --json >converted 2>&1
        "$pinflow" stream "$expected" --device host --json >expected.json
        [ "$(digest_of converted)" = "$(digest_of expected.json)" ]
        ;;
    esac
}

# run ARGUMENTS...: runs the tool under the limit
run() {
    local status lines
    {
        (
            limit || exit 126
            exec "$pinflow" "$@"
        ) >stdout 2>stderr
        status=$?
    } 2>/dev/null  # what the shell says of signals
    runs=$((runs + 1))
    lines=$(wc -l <stderr)
    if [ $status = 0 ] && [ "$lines" = 0 ]; then
        if is_right "$@"; then return; fi
        failures=$((failures + 1))
        printf '%s: pinflow %s: another result than in the first run\n' "$at" "$*"
        return
    fi
    if [ $status = 1 ] && [ "$lines" = 1 ] && grep -q '^pinflow: error: ' stderr; then
        refused=$((refused + 1))
        return
    fi
    failures=$((failures + 1))
    printf '%s: pinflow %s: exit status %d: %s\n' "$at" "$*" $status "$(head -c 300 stderr | tr '\n' '|')"
}

run_corpus() {
    local file target
    for file in "${corpus[@]}"; do
        run inspect "$file"
        run stream "$file" --device host --json "$@"
        run stream "$file" --device host --json --order shuffled --epochs 2 "$@"
        for target in "${targets[@]}"; do
            run convert "$file" "out/copy.$target"
            rm -f "out/copy.$target"
        done
        run convert "$file" out/cast.npy --dtype float64
        rm -f out/cast.npy
        if [[ " ${targets[*]} " == *' h5 '* ]]; then
            run convert "$file" out/deflated.h5 --deflate 1
            rm -f out/deflated.h5
        fi
    done
}

# between STEP FIRST LAST: prints the limit of a step. Step 1 has the limit FIRST, the last of several has LAST.
between() { printf '%d' $(($2 + ($3 - $2) * ($1 - 1) / (steps > 1 ? steps - 1 : 1))); }

# make_group CONTROLLER: sets `group`, or says why the mode is skipped
make_group() {
    group=/sys/fs/cgroup/$1/pinflow-test.$$
    if ! mkdir "$group" 2>/dev/null; then
        group=
        printf '%s: skipped: no cgroup of version 1 can be made below /sys/fs/cgroup/%s\n' "$mode" "$1"
        return 1
    fi
}
end_group() {
    rmdir "$group"
    group=
}

sweep_memory() {
    make_group memory || return
    limit() { echo "$BASHPID" >"$group/cgroup.procs"; }
    make_large
    for ((step = 1; step <= steps; ++step)); do
        # from the largest down: a sweep of one step takes the largest
        local size_bytes
        size_bytes=$(between "$step" $((256 << 20)) $((16 << 20)))
        echo 0 >"$group/memory.force_empty"
        echo "$size_bytes" >"$group/memory.limit_in_bytes"
        at="memory of $size_bytes bytes"
        run_corpus
        run stream large.npy --device host --json --batch 16384
        run stream large.npy --device host --json --slots 4000
        run stream a.npy --device host --json --threads 1024
        for file in zeros.npz metadata.safetensors names.safetensors; do
            [ -e $file ] && run inspect $file
            [ -e $file ] && [ $file != names.safetensors ] && run stream $file --device host --json
        done
    done
    rm -f large.npy zeros.npz metadata.safetensors names.safetensors
    end_group
}

sweep_address() {
    local first=1024 kibibytes
    {
        until (ulimit -v $first && exec "$pinflow" --version) >/dev/null; do
            first=$((first + 256))
            ((first < 4 << 20)) || exit_with "pinflow --version does not run in 4 GiB of addresses"
        done
    } 2>/dev/null
    limit() { ulimit -v "$kibibytes"; }
    for ((step = 1; step <= steps; ++step)); do
        kibibytes=$(between "$step" $first $((first + (512 << 10))))
        at="ulimit -v $kibibytes"
        run_corpus
    done
}

sweep_descriptors() {
    local first=3 count
    {
        until (ulimit -n $first && exec "$pinflow" --version) >/dev/null; do
            first=$((first + 1))
            ((first < 1000)) || exit_with "pinflow --version does not run with 1,000 descriptors"
        done
    } 2>/dev/null
    limit() { ulimit -n "$count"; }
    for ((step = 1; step <= steps; ++step)); do
        count=$((first + step - 1))
        at="ulimit -n $count"
        run_corpus
    done
}

sweep_locked() {
    local kibibytes
    limit() { ulimit -l "$kibibytes"; }
    for ((step = 1; step <= steps; ++step)); do
        kibibytes=$(between "$step" 0 8192)
        at="ulimit -l $kibibytes"
        run_corpus
    done
}

sweep_processes() {
    make_group pids || return
    limit() { echo "$BASHPID" >"$group/cgroup.procs"; }
    for ((step = 1; step <= steps; ++step)); do
        echo "$step" >"$group/pids.max"
        at="a pids cgroup of $step"
        run_corpus --threads 8
        run stream a.npy --device host --json --threads 1
    done
    end_group
}

at='without limits'
run_corpus
if [ $failures != 0 ]; then exit_with 'something fails without limits'; fi

for mode in "${modes[@]}"; do
    runs=0 refused=0 failures_before=$failures
    "sweep_$mode" || true
    if [ $runs -gt 0 ]; then
        printf '%s: %d runs, %d refused with a sentence, %d failed otherwise\n' "$mode" $runs $refused \
            $((failures - failures_before))
    fi
done
[ $failures = 0 ]
