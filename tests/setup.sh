# Sourced by the scripts that start from a bare machine. Sets $root, PATH, HOME and LC_ALL, takes stdin from /dev/null,
# and defines the functions below. Run by itself, it installs what builds of the library and of the Python package need.
# Debian 12 and Ubuntu 24.04 are supported; packages come from the distribution only.
# shellcheck shell=bash

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

# `env -i` leaves none of these.
export PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}
export HOME=${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}
export LC_ALL=C.UTF-8
exec </dev/null

say() {
    printf '== %s\n' "$*"
}

fail() {
    printf '%s: %s\n' "$(basename -- "$0")" "$*" >&2
    exit 1
}

# need_packages NAME...: installs the packages that are missing. Runs apt-get only if some are.
need_packages() {
    if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
        fail "this script needs the packages of Debian 12 or Ubuntu 24.04; elsewhere install what CMakeLists.txt looks for and use the CMake presets."
    fi
    local package missing=()
    for package in "$@"; do
        if [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
            missing+=("$package")
        fi
    done
    [ ${#missing[@]} -gt 0 ] || return 0

    local as_root=()
    if [ "$(id -u)" != 0 ]; then
        # sudo asks on the terminal, if there is one.
        if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || { : </dev/tty; } 2>/dev/null; }; then
            as_root=(sudo)
        else
            fail "cannot install ${missing[*]}: this needs root, or sudo (without a password if there is no terminal)."
        fi
    fi
    say "installing ${missing[*]}"
    local apt_get=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
    "${apt_get[@]}" update
    "${apt_get[@]}" install --yes --no-install-recommends "${missing[@]}"
}

# Installs what is needed to build the library, the tool, the samples and the tests, and to run the tests.
need_build_packages() {
    need_packages g++ cmake ninja-build libtbb-dev libboost-dev libfmt-dev libcli11-dev nlohmann-json3-dev \
        libdeflate-dev libhdf5-dev liblzf-dev librandom123-dev libxxhash-dev xxhash zlib1g-dev doctest-dev python3 python3-numpy python3-h5py
}

# configure_and_build PRESET [-DOPTION=VALUE...] [TARGET...]
configure_and_build() {
    local preset=$1 word options=() targets=()
    shift
    for word in "$@"; do
        if [[ $word == -D* ]]; then options+=("$word"); else targets+=("$word"); fi
    done
    if command -v ccache >/dev/null; then
        export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
        export CCACHE_SLOPPINESS=pch_defines,time_macros
    fi
    (cd "$root" && cmake --preset "$preset" "${options[@]}" &&
        cmake --build --preset "$preset" ${targets:+--target "${targets[@]}"})
}

# fetch_source PACKAGE VERSION FOLDER: unpacks the source of a package of the distribution below FOLDER/source. Needs no
# root: apt works in FOLDER, and the machine's sources stay as they are.
fetch_source() {
    local package=$1 version=$2 work=$3 uris file
    mkdir -p "$work"/apt/{sources,lists/partial,cache/archives/partial} "$work/source"
    # The entries that the package came from, as source entries. Their options (keys, mirrors) stay.
    uris=$(apt-cache madison "$package" | sed 's/.*| *//; s/ .*//' | sort -u)
    for file in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
        if [ -r "$file" ] && grep -qF -- "$uris" "$file"; then
            sed -E 's/^deb([[:space:]])/deb-src\1/; s/^Types:.*/Types: deb-src/' "$file" \
                >"$work/apt/sources/$(basename -- "$file")"
        fi
    done
    local apt_options=(
        -qq
        -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$work/apt/sources"
        -o Dir::State::Lists="$work/apt/lists" -o Dir::Cache="$work/apt/cache"
        -o APT::Sandbox::User="$(id -un)"
    )
    apt-get "${apt_options[@]}" update
    (cd "$work/source" && apt-get "${apt_options[@]}" source "$package=$version")
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    need_build_packages
    need_packages python3-venv
fi
