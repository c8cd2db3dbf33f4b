#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds for sm_90 (or the architecture given), runs the GPU tests, the example and the benches, and a part of the tests
# under compute-sanitizer if that starts: six minutes, the build included, on 16 processors. Needs nvcc and the headers of
# Eigen and Catch2 2; no network. Without a device it builds, says so, and exits with 77.
#
# usage: bench/cuda/run_on_device.sh [OUT [ARCHITECTURE]]
# results: OUT/bench.json and OUT/bench.txt (a table), OUT/summary.json, OUT/*.log
#
# Targets, of which OUT/bench.json says pass or not (each line beside its bound, measured in the same run):
#   holes filled, rows packed out of place     at least 80 % of a copy, 256 MiB and more
#   rows packed in place                       at least 60 % of it
#   window scores, 32 queries x 32 heads       at most 2 x reading K with an LSE, 4.5 x without
#   selection of 2,048 rows of 64 x 16,384     at most 20 us
#   a decode step of 64 sequences, HeavyHitter at most 30 us, append to commit
# Without a target: 12,288 rows (all the shared memory of a block), a captured first call of SnapKV, fp8, plans.
#
# If Eigen or Catch2 are not installed, put their headers next to the checkout and name the folders:
#   EIGEN_INCLUDE=.../eigen3 (holds Eigen/)   CATCH_INCLUDE=.../include (holds catch2/catch.hpp)
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/device}
architecture=${2:-90}
mkdir -p "$out"
jobs=$(nproc)
begin=$SECONDS
most=360 # seconds for all of it
results=()
note() { # name, exit code, seconds
  local verdict=failed
  case $2 in
    0) verdict=passed ;;
    77) verdict=skipped ;;
    124) verdict=timed_out ;;
  esac
  results+=("    {\"step\": \"$1\", \"result\": \"$verdict\", \"seconds\": $3}")
  echo "--- $1: $verdict, $3 s"
}
within() { # the seconds asked for, or those that are left
  local left=$((most - SECONDS + begin))
  ((left < 1)) && left=1
  echo $(($1 < left ? $1 : left))
}
run() { # name, time limit, command...
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  timeout "$(within "$limit")" "$@" >"$out/$name.log" 2>&1
  local rc=$?
  note "$name" $rc $((SECONDS - start))
  return $rc
}
finish() {
  {
    echo "{"
    echo "  \"device\": \"$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -n 1)\","
    echo "  \"nvcc\": \"$(nvcc --version | tail -n 1)\","
    echo "  \"seconds\": $((SECONDS - begin)),"
    echo "  \"steps\": ["
    local i
    for i in "${!results[@]}"; do
      echo "${results[$i]}$([[ $i -lt $((${#results[@]} - 1)) ]] && echo ,)"
    done
    echo "  ]"
    echo "}"
  } >"$out/summary.json"
  cat "$out/summary.json"
}
trap finish EXIT

# The compiler is called directly: no CMake package is searched for, so that headers brought along will do.
includes=(-Iinclude -Icuda -Itests -Itests/emulator)
[[ -n ${EIGEN_INCLUDE:-} ]] && includes+=("-I$EIGEN_INCLUDE")
[[ -z ${EIGEN_INCLUDE:-} && -d /usr/include/eigen3 ]] && includes+=(-I/usr/include/eigen3)
[[ -n ${CATCH_INCLUDE:-} ]] && includes+=("-I$CATCH_INCLUDE")
flags=(-std=c++20 --expt-relaxed-constexpr -O2 -DNDEBUG "-arch=sm_$architecture" "${includes[@]}")
elsewhere=-DKVTRIM_CUDA_KERNELS_ELSEWHERE # the score kernels are those of kernels_score.cu
build() {
  local objects=$out/objects
  mkdir -p "$objects"
  {
    echo "nvcc ${flags[*]} --split-compile=0 -c tests/cuda/kernels_score.cu -o $objects/kernels_score.o"
    local f
    for f in tests/cuda/*/*_test.cu examples/cuda_step.cu bench/cuda/cuda_bench.cu; do
      echo "nvcc ${flags[*]} $elsewhere -c $f -o $objects/$(basename "${f%.cu}").o"
    done
    for f in tests/cuda/main.cpp tests/cuda/*/*.cpp; do
      echo "nvcc ${flags[*]} -c $f -o $objects/$(basename "${f%.cpp}").o"
    done
  } | xargs -P "$jobs" -I{} sh -c '{}' || return 1
  local tests=("$objects/main.o") f
  for f in tests/cuda/*/*_test.cu tests/cuda/*/*.cpp; do
    f=$(basename "$f")
    tests+=("$objects/${f%.*}.o")
  done
  nvcc "-arch=sm_$architecture" "${tests[@]}" "$objects/kernels_score.o" -o "$out/gpu_tests" &&
    nvcc "-arch=sm_$architecture" "$objects/cuda_step.o" "$objects/kernels_score.o" -o "$out/cuda_step" &&
    nvcc "-arch=sm_$architecture" "$objects/cuda_bench.o" "$objects/kernels_score.o" -o "$out/cuda_bench"
}
start=$SECONDS
build >"$out/build.log" 2>&1
rc=$?
note build $rc $((SECONDS - start))
((rc == 0)) || exit 1

failed=0
start=$SECONDS
timeout "$(within 90)" "$out/cuda_bench" >"$out/bench.json" 2>"$out/bench.txt"
rc=$?
note cuda_bench $rc $((SECONDS - start))
cat "$out/bench.txt"
if ((rc == 77)); then
  echo "run_on_device: there is no CUDA device here: everything was built for sm_$architecture, nothing was run"
  exit 77
fi
((rc == 0)) || failed=1
grep -q '"all_pass": true' "$out/bench.json" || echo "run_on_device: a target was missed"
run cuda_step 20 "$out/cuda_step" || failed=1
run gpu_tests 90 "$out/gpu_tests" || failed=1
if command -v compute-sanitizer >/dev/null; then
  run memcheck 60 compute-sanitizer --tool memcheck --error-exitcode 1 "$out/gpu_tests" "cuda::top_k: one row*,cuda::plan: rows of any size*" || true
  run racecheck 60 compute-sanitizer --tool racecheck --error-exitcode 1 "$out/gpu_tests" "cuda::top_k: one row*" || true
fi
exit $failed
