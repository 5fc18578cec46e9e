#!/usr/bin/env bash
# fail_every_call.sh FAIL_EVERY_CALL [SECONDS] [OPTION...]
#
# Runs fail_every_call on every core: all runs, or runs drawn at random for SECONDS. All runs took 1,396 s under ASan on
# 2 cores of an AMD EPYC virtual machine (2026-11-23, host device). SEED, from the environment, repeats a draw. Options
# are passed on: --scenario TEXT, --calls, --cuda-calls, --allocations, --device cuda:0, --jobs N, --part I/N.
set -euo pipefail

program=$(realpath -- "${1:?usage: fail_every_call.sh FAIL_EVERY_CALL [SECONDS] [OPTION...]}")
seconds=${2:-0}
shift $(($# < 2 ? $# : 2))
folder=$(mktemp -d "${TMPDIR:-/tmp}/fail-every-call.XXXXXX")
trap 'rm -rf "$folder"' EXIT

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=1:allocator_may_return_null=1:handle_abort=1}
TMPDIR=$folder "$program" --seconds "$seconds" --seed "${SEED:-$RANDOM}" --jobs "$(nproc)" "$@"
