#!/usr/bin/env bash
# segment_small_tmpfs.sh PINFLOW: on a /dev/shm of 1 MiB, `pin` refuses what is too large before it copies a byte, says
# what is free, and leaves nothing. Exit status 77 if this user may not mount a tmpfs in a namespace of its own.
set -euo pipefail

pinflow=$(realpath -- "${1:?usage: segment_small_tmpfs.sh PINFLOW}")
if [ "${2:-}" != inside ]; then
    unshare --mount --map-root-user true 2>/dev/null || exit 77
    exec unshare --mount --map-root-user "$0" "$pinflow" inside
fi
mount -t tmpfs -o size=1m,mode=1777 tmpfs /dev/shm 2>/dev/null || exit 77
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
file() { # NAME BYTES
    printf '\x93NUMPY\x01\x00\x76\x00%-117s\n' "{'descr': '|u1', 'fortran_order': False, 'shape': ($2,), }" >"$work/$1.npy"
    head -c "$2" /dev/zero >>"$work/$1.npy"
}
fail() {
    printf 'segment_small_tmpfs.sh: %s\n' "$1"
    exit 1
}
folder=/dev/shm/pinflow-$(id -u)

# their data alone would fit
file a 518000
file b 518000
(cd "$work" && python3 -m zipfile -c two.npz a.npy b.npy)
if message=$("$pinflow" pin "$work/two.npz" two 2>&1); then fail "the arrays of a group were pinned"; fi
case $message in
"pinflow: error: cannot publish '$folder/two': it takes "*) ;;
*) fail "the message about the group is: $message" ;;
esac

file small 100000
file large 2000000
"$pinflow" pin "$work/small.npy" small >/dev/null
if message=$("$pinflow" pin "$work/large.npy" large 2>&1); then fail "the large array was pinned"; fi
case $message in
"pinflow: error: "*" bytes free;"*"--shm-size"*) ;;
*) fail "the message is: $message" ;;
esac
for number in 1 2 3 4 5 6 7 8 9 10 11 12; do
    "$pinflow" pin "$work/small.npy" "more-$number" >/dev/null 2>&1 || break
done
[ "$number" -gt 5 ] && [ "$number" -lt 12 ] || fail "$number segments fit"
"$pinflow" verify shm:small >/dev/null || fail "the first segment has changed"
[ "$(find "$folder" -type f | wc -l)" -eq "$number" ] || fail "something else is left"
