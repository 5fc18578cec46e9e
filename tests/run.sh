#!/usr/bin/env bash
# Builds the library, the tool, the samples and the tests in Release, and runs the tests. On a bare Debian 12 or Ubuntu
# 24.04 it first installs what is missing from the distribution's packages. Arguments go to ctest: tests/run.sh -R npy
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"

need_build_packages
configure_and_build release -DPINFLOW_BUILD_TESTS=ON -DPINFLOW_BUILD_TOOL=ON -DPINFLOW_BUILD_SAMPLES=ON
cd "$root"
ctest --preset release --parallel "$(nproc)" "$@"
