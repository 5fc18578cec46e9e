#!/usr/bin/env bash
# convert_kill.sh PINFLOW [KILLS]
#
# Kills `pinflow convert` with SIGKILL, KILLS times (10). It replaces another file, of each format in turn, or its own
# input, a .npy file. In every second pass over these targets, a kill comes soon after convert began to write:
# within a tenth of the time of an undisturbed run. In the other passes, a kill comes at any moment. Afterwards the file
# must be the old one or the new one, byte for byte. A kill may leave a temporary file beside it. If the filesystem has
# files without a name (O_TMPFILE), at most KILLS / 20 + 1 kills may leave one. SEED, from the environment, repeats a
# run.
set -euo pipefail

pinflow=$(realpath -- "${1:?usage: convert_kill.sh PINFLOW [KILLS]}")
kills=${2:-10}
seed=${SEED:-$RANDOM}
RANDOM=$seed
folder=$(realpath -- "$(mktemp -d "${TMPDIR:-/tmp}/convert-kill.XXXXXX")")  # as /proc shows it
trap 'rm -rf "$folder"' EXIT
cd "$folder"
mkdir work expected

fail() {
    printf 'convert_kill.sh: %s (SEED=%s, kill %s)\n' "$1" "$seed" "$kill"
    ls -la work
    exit 1
}

# 24 MiB after a header made by hand: 118 characters (0x76) after the magic, the version and the header's length
{
    printf '\x93NUMPY\x01\x00\x76\x00%-117s\n' "{'descr': '|u1', 'fortran_order': False, 'shape': (24576, 1024), }"
    head -c $((24 << 20)) /dev/urandom
} >input.npy
extensions=(npy npz safetensors)
if "$pinflow" convert input.npy expected/new.h5 >/dev/null 2>&1; then
    extensions+=(h5)  # unless this build lacks it
fi
for extension in "${extensions[@]}"; do
    head -c 1000000 /dev/urandom >"expected/old.$extension"
    "$pinflow" convert input.npy "expected/new.$extension" --dtype int16 >/dev/null
done
begin=$(date +%s%N)
"$pinflow" convert input.npy expected/again.npy --dtype int16 >/dev/null
duration_us=$((($(date +%s%N) - begin) / 1000))

# Whether the process writes: it has a file in work/ open that has no name or a temporary one.
writes() {
    local file
    for file in "/proc/$process/fd"/*; do
        case $(readlink "$file" 2>/dev/null) in
        "$folder"/work/*' (deleted)' | "$folder"/work/.pinflow-*.tmp) return 0 ;;
        esac
    done
    return 1
}

# Even with O_TMPFILE, a file has a temporary name for a moment.
max_temporary=$kills
if /usr/bin/python3 -c 'import os; os.open("work", os.O_RDWR | os.O_TMPFILE)' 2>/dev/null; then
    max_temporary=$((kills / 20 + 1))
fi

old=0 new=0 writing=0 temporary=0
for ((kill = 1; kill <= kills; ++kill)); do
    # onto the input, then onto another file of each format
    index=$((kill % (${#extensions[@]} + 1)))
    if [ $index = 0 ]; then
        in=work/target.npy out=work/target.npy before=input.npy after=expected/new.npy
    else
        extension=${extensions[index - 1]}
        in=input.npy out=work/target.$extension before=expected/old.$extension after=expected/new.$extension
    fi
    cp "$before" "$out"
    "$pinflow" convert "$in" "$out" --dtype int16 >/dev/null 2>&1 &
    process=$!
    # up to a little longer than it takes undisturbed, or up to a tenth of that after it began to write
    longest_us=$((duration_us * 11 / 10))
    if ((kill / (${#extensions[@]} + 1) % 2 == 1)); then
        until writes || ! kill -0 "$process" 2>/dev/null; do :; done
        longest_us=$((duration_us / 10))
    fi
    delay_us=$(((RANDOM << 15 | RANDOM) % (longest_us + 1)))
    sleep "$(printf '%d.%06d' $((delay_us / 1000000)) $((delay_us % 1000000)))"
    kill -STOP "$process" 2>/dev/null || true
    if writes; then writing=$((writing + 1)); fi
    kill -KILL "$process" 2>/dev/null || true
    wait "$process" 2>/dev/null || true

    if cmp -s "$out" "$before"; then
        old=$((old + 1))
    elif cmp -s "$out" "$after"; then
        new=$((new + 1))
    else
        fail "'$out' is neither the old file nor the new one"
    fi
    rm "$out"
    for left in work/.pinflow-*.tmp; do
        if [ -e "$left" ]; then
            temporary=$((temporary + 1))
            rm "$left"
        fi
    done
    [ -z "$(ls -A work)" ] || fail "there is more than a temporary file beside '$out'"
done
printf '%d kills within %d ms: %d left the old file, %d the new one; %d came while it was written, %d left a temporary name (SEED=%s)\n' \
    "$kills" $((duration_us * 11 / 10000)) $old $new $writing $temporary "$seed"
if [ $temporary -gt $max_temporary ]; then
    fail "too many files have temporary names, although this filesystem has unnamed files"
fi
if [ $writing = 0 ]; then
    fail "no kill came while a file was written"
fi
