#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sh examples/model/with_model.sh default.gguf program arguments...
#
# Runs `program --model M arguments...`, M being $KVTRIM_MODEL or else default.gguf: which file that
# is, is known only when it runs. Returns 77, ctest's "skipped", where there is no such file. (A
# shell, and exec: through CMake's execute_process the program would not see the terminal.)
set -eu
model=${KVTRIM_MODEL:-$1}
program=$2
shift 2
if [ ! -e "$model" ]; then
  echo "skipped: there is no model at $model"
  exit 77
fi
exec "$program" --model "$model" "$@"
