#!/usr/bin/env bash
# segment_kill.sh PINFLOW [KILLS]
#
# Kills processes that use one segment with SIGKILL, KILLS times (20), at random moments: in turn one that publishes it,
# one that replaces it, and one that reads it. After each kill the name must open with the right digest or not exist.
# The folder must hold no other file whose name contains the segment's, but a killed --replace may leave one that begins
# with a dot, which the next publisher removes. The next publisher must finish within four times its undisturbed time
# plus one second. SEED, from the environment, repeats a run.
set -euo pipefail

pinflow=$(realpath -- "${1:?usage: segment_kill.sh PINFLOW [KILLS]}")
kills=${2:-20}
seed=${SEED:-$RANDOM}
RANDOM=$seed
name=segment-kill-$$
folder=/dev/shm/pinflow-$(id -u)
work=$(mktemp -d "${TMPDIR:-/tmp}/segment-kill.XXXXXX")
trap 'rm -rf "$work"; "$pinflow" unpin "$name" >/dev/null 2>&1 || true' EXIT

fail() {
    printf 'segment_kill.sh: %s (SEED=%s, kill %s)\n' "$1" "$seed" "$kill"
    ls -laR "$folder"
    exit 1
}

digest_of() { "$pinflow" stream --json --device host "$1" | grep -o '"digest":"[0-9a-f]*"'; }

# two arrays of 24 MiB, headers made by hand: 118 characters (0x76) after the magic, the version and the header's length
for file in first second; do
    {
        printf '\x93NUMPY\x01\x00\x76\x00%-117s\n' "{'descr': '|u1', 'fortran_order': False, 'shape': (24576, 1024), }"
        head -c $((24 << 20)) /dev/urandom
    } >"$work/$file.npy"
done
first=$(digest_of "$work/first.npy")
second=$(digest_of "$work/second.npy")

begin=$(date +%s%N)
"$pinflow" pin "$work/first.npy" "$name" >/dev/null
duration_us=$((($(date +%s%N) - begin) / 1000))

killed=0
opened=0
for ((kill = 1; kill <= kills; ++kill)); do
    case $((kill % 3)) in
    0)
        "$pinflow" unpin "$name" 2>/dev/null || true
        "$pinflow" pin "$work/first.npy" "$name" >/dev/null 2>&1 &
        ;;
    1) "$pinflow" pin "$work/second.npy" "$name" --replace >/dev/null 2>&1 & ;;
    2) "$pinflow" stream "shm:$name" --device host --epochs 1000 >/dev/null 2>&1 & ;;
    esac
    process=$!
    sleep "$(awk -v us=$(((RANDOM * 32768 + RANDOM) % (duration_us + duration_us / 4 + 1))) 'BEGIN { printf "%.6f", us / 1e6 }')"
    kill -KILL "$process" 2>/dev/null && killed=$((killed + 1))
    wait "$process" 2>/dev/null || true

    hidden=$(find "$folder" -name ".$name*" | wc -l)
    [ "$hidden" -eq 0 ] || { [ $((kill % 3)) -eq 1 ] && [ "$hidden" -eq 1 ]; } || fail "$hidden names that begin with a dot are left"
    if [ -e "$folder/$name.npy" ]; then
        opened=$((opened + 1))
        found=$(digest_of "shm:$name")
        [ "$found" = "$first" ] || [ "$found" = "$second" ] || fail "the segment has another digest, $found"
        "$pinflow" verify "shm:$name" >/dev/null || fail "the segment's checksum is wrong"
    fi
    begin=$(date +%s%N)
    "$pinflow" pin "$work/first.npy" "$name" --replace >/dev/null || fail "the next publisher fails"
    took_us=$((($(date +%s%N) - begin) / 1000))
    [ "$took_us" -lt $((duration_us * 4 + 30000000)) ] || fail "the next publisher took $took_us us"
    [ "$(find "$folder" -name "*$name*" | wc -l)" -eq 1 ] || fail "more than the segment is left"
    [ "$(digest_of "shm:$name")" = "$first" ] || fail "the next publisher's segment has another digest"
done
printf 'segment_kill.sh: %s kills, %s of them while the process ran; the name opened after %s\n' "$kills" "$killed" "$opened"
