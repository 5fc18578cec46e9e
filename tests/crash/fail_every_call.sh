#!/usr/bin/env bash
# fail_every_call.sh FAIL_EVERY_CALL [SECONDS] [OPTION...]
#
# Runs fail_every_call on every core: all runs, which takes more than an hour under ASan, or runs drawn at random for SECONDS.
# SEED, from the environment, repeats such a draw. The options go to each process: --scenario TEXT, --calls, --allocations,
# --device cuda:0 (then with one process at a time: JOBS=1).
set -euo pipefail

program=$(realpath -- "${1:?usage: fail_every_call.sh FAIL_EVERY_CALL [SECONDS] [OPTION...]}")
seconds=${2:-0}
shift $(($# < 2 ? $# : 2))
seed=${SEED:-$RANDOM}
jobs=${JOBS:-$(nproc)}
folder=$(mktemp -d "${TMPDIR:-/tmp}/fail-every-call.XXXXXX")
trap 'rm -rf "$folder"' EXIT

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:allocator_may_return_null=1:handle_abort=1}
export TMPDIR=$folder
children=()
for ((part = 0; part < jobs; ++part)); do
    "$program" --seconds "$seconds" --seed "$seed" --part "$part/$jobs" "$@" >"$folder/log-$part" 2>&1 &
    children+=($!)
done
status=0
for part in "${!children[@]}"; do
    wait "${children[part]}" || status=1
    cat "$folder/log-$part"
done
exit $status
