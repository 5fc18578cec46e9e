#!/usr/bin/env bash
# From a bare Debian 12 or Ubuntu 24.04 to data in a training loop: installs missing packages from the distribution,
# builds Release, trains on handwritten digits, makes a 1 GiB .npy and streams it in order and shuffled. Everything made
# stays in build/release, so that the next run takes seconds.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../tests/setup.sh"

need_build_packages
# both options are set, because build/release may have been configured without the tool or the samples
configure_and_build release -DPINFLOW_BUILD_TOOL=ON -DPINFLOW_BUILD_SAMPLES=ON pinflow_tool train_digits make_npy

build=$root/build/release
pinflow=$build/bin/pinflow
data=$build/quickstart.npy

say "training a softmax classifier on samples/data, through a shuffling loader"
"$build/samples/train_digits" "$root/samples/data"

if [ ! -e "$data" ]; then
    say "making a 1 GiB array of 4096 rows of 256 KiB"
    "$build/samples/make_npy" "$data"
fi
"$pinflow" inspect "$data"
for order in sequential shuffled; do
    say "streaming it, $order, 2 epochs"
    "$pinflow" stream "$data" --order "$order" --epochs 2
done
