#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sh run_ranks.sh default.gguf file ranks "1 heads:3 context:2" "arguments of all" mpirun its-arguments... -n
#
# Runs the program `ranks` in one process, which writes what it computed to `file`, and then over ranks, which compare
# themselves with that. Goes on where a comparison fails, and fails at the end. 77, ctest's "skipped", without a model.
set -eu
model=${KVTRIM_MODEL:-$1}
file=$2
ranks=$3
runs=$4
arguments=$5
shift 5
if [ ! -e "$model" ]; then
  echo "skipped: there is no model at $model"
  exit 77
fi
trap 'rm -f "$file"' EXIT
failed=0
for run in $runs; do
  # shellcheck disable=SC2086 # several arguments
  case $run in
    1) "$@" 1 "$ranks" --model "$model" --record "$file" --threads "$(nproc)" $arguments || exit 1 ;;
    *) "$@" "${run#*:}" "$ranks" --model "$model" --compare "$file" --split "${run%:*}" $arguments || failed=1 ;;
  esac
  echo
done
exit $failed
