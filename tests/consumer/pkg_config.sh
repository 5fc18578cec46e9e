#!/usr/bin/env bash
# pkg_config.sh INSTALLED BUILD COMPILER [FLAGS...]: builds the consumer with the flags that pkg-config gives for an
# installed pinflow, and runs it.
set -euo pipefail
installed=$1 build=$2 compiler=("${@:3}")
source=$(dirname -- "${BASH_SOURCE[0]}")
PKG_CONFIG_PATH=$(find "$installed" -name pkgconfig)
export PKG_CONFIG_PATH
read -ra flags <<<"$(pkg-config --cflags --libs pinflow)"
"${compiler[@]}" -std=c++20 "$source/main.cpp" -o "$build/by_pkg_config" "${flags[@]}"
LD_LIBRARY_PATH=$(pkg-config --variable=libdir pinflow) "$build/by_pkg_config" "$build/by_pkg_config.npy"
