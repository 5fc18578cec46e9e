#!/usr/bin/env bash
# convert_vs_cp.sh PINFLOW [FOLDER]
#
# Measures `pinflow convert IN.npy OUT.npy` against `cp --reflink=never` followed by `sync` of the copy: the same file,
# in turns, with alternating order. Both end with the data on the disk. Prints each time, the medians and their ratio
# (convert's rate over cp's). Settings, from the environment:
#   GIB           size of the file (4); FOLDER needs twice that
#   REPETITIONS   of each (5)
#   DROP          1: drops the page cache before each run (needs root), so that both read the input from the disk
set -euo pipefail

pinflow=${1:?usage: convert_vs_cp.sh PINFLOW [FOLDER]}
folder=$(mktemp -d "${2:-.}/convert-vs-cp.XXXXXX")
trap 'rm -rf "$folder"' EXIT
gib=${GIB:-4}
repetitions=${REPETITIONS:-5}
in=$folder/in.npy copy=$folder/copy.npy out=$folder/out.npy

# random bytes behind a header made by hand; converted once, so that the input has the header that convert writes
bytes=$((gib << 30))
header="{'descr': '|u1', 'fortran_order': False, 'shape': ($((bytes >> 12)), 4096), }"
{
    printf '\x93NUMPY\x01\x00\x76\x00%-117s\n' "$header"
    head -c "$bytes" /dev/urandom
} >"$folder/made.npy"
"$pinflow" convert "$folder/made.npy" "$in"
rm "$folder/made.npy"

# timed COMMAND...: its seconds, after removing the output file of the run before. (Its pages are then free. Otherwise a
# virtual machine may have to request new pages from its host, at a tenth of the speed.)
timed() {
    local begin end
    rm -f "$copy" "$out"
    sync
    if [ "${DROP:-0}" = 1 ]; then echo 3 >/proc/sys/vm/drop_caches; fi
    begin=$(date +%s%N)
    "$@" >/dev/null
    end=$(date +%s%N)
    awk -v ns=$((end - begin)) 'BEGIN { printf "%.3f\n", ns / 1e9 }'
}

copy_and_sync() {
    cp --reflink=never "$in" "$copy"
    sync "$copy"
}

measure_cp() {
    cp_seconds+=("$(timed copy_and_sync)")
    cmp "$in" "$copy"
}

measure_convert() {
    convert_seconds+=("$(timed "$pinflow" convert "$in" "$out")")
    cmp "$in" "$out"
}

median() {
    printf '%s\n' "$@" | sort -n | awk '{ v[NR] = $1 } END { print NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2 }'
}

timed copy_and_sync >/dev/null  # warm-up, so that the first timed run also follows a run whose output is removed
cp_seconds=() convert_seconds=()
for ((i = 0; i < repetitions; ++i)); do
    if ((i % 2 == 0)); then
        measure_cp
        measure_convert
    else
        measure_convert
        measure_cp
    fi
    printf 'cp and sync %s s, convert %s s\n' "${cp_seconds[-1]}" "${convert_seconds[-1]}"
done
awk -v bytes="$bytes" -v cp="$(median "${cp_seconds[@]}")" -v convert="$(median "${convert_seconds[@]}")" 'BEGIN {
    printf "medians of %.0f bytes: cp and sync %.2f GB/s, convert %.2f GB/s, ratio %.2f\n",
        bytes, bytes / cp / 1e9, bytes / convert / 1e9, cp / convert
}'
