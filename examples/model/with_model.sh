#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sh examples/model/with_model.sh default.gguf program arguments...
#
# Runs `program --model M arguments...`, where M is $KVTRIM_MODEL or, if unset, default.gguf: which file
# that is becomes known only at run time. Returns 77, ctest's "skipped", if there is no such file. (A
# shell script with exec, because through CMake's execute_process the program would not see the terminal.)
set -eu
model=${KVTRIM_MODEL:-$1}
program=$2
shift 2
if [ ! -e "$model" ]; then
  echo "skipped: there is no model at $model"
  exit 77
fi
exec "$program" --model "$model" "$@"
