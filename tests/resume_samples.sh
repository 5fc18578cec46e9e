#!/usr/bin/env bash
# resume_samples.sh RESUME_TRAINING MANY_RANKS DATA
#
# A training run that is stopped again and again ends with the model of one that is not, and several ranks stream every
# row of a file once an epoch. DATA is the folder with the digits.
set -euo pipefail

training=$(realpath -- "$1") ranks=$(realpath -- "$2") data=$(realpath -- "$3")
folder=$(mktemp -d "${TMPDIR:-/tmp}/resume-samples.XXXXXX")
trap 'rm -rf "$folder"' EXIT
cd "$folder"

fail() {
    printf 'resume_samples.sh: %s\n' "$1"
    exit 1
}

whole=$("$training" "$data" whole 1000000)
[[ $whole == "finished after "*" steps, checksum "* ]] || fail "a whole run says '$whole'"
runs=0 part=
until [[ $part == "finished "* ]]; do
    runs=$((runs + 1))
    part=$("$training" "$data" parts $((runs * 7 % 31 + 1)))
    [ "$runs" -lt 1000 ] || fail "a stopped run does not come to its end"
done
[ "$runs" -gt 5 ] || fail "the run was hardly stopped"
[ "${part##* }" = "${whole##* }" ] || fail "after $runs runs the model is '$part', without a stop '$whole'"

# sum WORLD EPOCHS: the digests of all ranks, added up
sum() {
    local total=0 rank line
    for ((rank = 0; rank < $1; ++rank)); do
        line=$(RANK=$rank WORLD_SIZE=$1 "$ranks" "$data/digits_train_images.npy" "$2")
        [[ $line == "rank $rank of $1: "* ]] || fail "a rank says '$line'"
        total=$((total + 0x${line##* }))
    done
    printf '%016x' "$total"
}
one=$(sum 1 1)
[ "$(sum 4 3)" = "$(printf '%016x' $((3 * 0x$one)))" ] || fail "four ranks do not stream the rows of one"
if "$ranks" "$data/digits_train_images.npy" 1 2>refused; then fail "many_ranks runs without RANK and WORLD_SIZE"; fi
grep -q RANK refused || fail "the error for a missing RANK does not name it"
printf 'a run in %d parts: %s; digest of all ranks %s an epoch\n' "$runs" "$part" "$one"
