#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The same scores keep the same rows with g++ and clang, at -O0, -O2, -O3 and for this machine's CPU, on 1, 2 and 8 threads:
# compares kept_sets with the committed checksum. About a minute on two cores. CXX_COMPILERS: others than g++ and clang++-19.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
eigen=${EIGEN_INCLUDE:-/usr/include/eigen3}
expected=$(cat "$here/checksum.txt")

check() { # compiler, flags
  local name=${1##*/}${2//[ \/]/_}
  # shellcheck disable=SC2086
  "$1" -std=c++20 $2 -pthread -I"$root/include" -I"$root/tests" -isystem "$eigen" "$here/kept_sets.cpp" -o "$work/$name"
  local sum
  sum=$("$work/$name" "$here/scores.txt")
  echo "$1 $2: $sum"
  [[ $sum == "$expected" ]] || { echo "determinism.sh: $1 $2 keeps other rows: $sum, expected $expected" >&2; return 1; }
}

failed=0
for compiler in ${CXX_COMPILERS:-g++ clang++-19}; do
  if ! command -v "$compiler" >/dev/null; then
    echo "determinism.sh: skipped $compiler, which is not here"
    continue
  fi
  for flags in -O0 -O2 -O3 "-O3 -march=native"; do
    check "$compiler" "$flags" &
    # Two at a time.
    if (($(jobs -rp | wc -l) >= 2)); then wait -n || failed=1; fi
  done
done
while [[ -n $(jobs -rp) ]]; do wait -n || failed=1; done
exit "$failed"
