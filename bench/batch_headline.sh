#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sh bench/batch_headline.sh [FOLDER]
#
# The pool of exactly 8 full streams of 2,048 + 128 tokens (8 x 136 pages of 16 rows in 90 tables: 765 MiB), 64 distinct prompts.
# A line of `run` takes 10 to 15 minutes on two idle cores; one whose file is in FOLDER is not run again. The streams alone stop
# after 16 tokens: the answers are in the first ten. Build first: cmake --preset demo && cmake --build build/demo --target batch
set -eu
root=$(dirname "$0")/..
folder=${1:-$root/build/headline}
batch=${KVTRIM_BATCH:-$root/build/demo/examples/batch}
model=${KVTRIM_MODEL:-$root/build/model/SmolLM2-135M-Instruct.Q4_1.gguf}
text=/usr/share/common-licenses/GFDL-1.3 # of Debian's base-files
mkdir -p "$folder"
run() { # name, then what differs
  name=$1
  shift
  [ -e "$folder/$name.jsonl" ] || "$batch" --model "$model" --pool-mib 765 --requests 64 \
    --context 2048 --text "$text" --json "$folder/$name.jsonl" "$@"
}
page=page:budget=224 # 14 pages
snapkv=snapkv:config=maxima,removed=0.95
run page --streams 64 --policy $page
run snapkv --streams 64 --policy $snapkv
run full --streams 64 --policy full
run page-alone --streams 1 --generate 16 --policy $page
run snapkv-alone --streams 1 --generate 16 --policy $snapkv
"$batch" --show "$folder/full.jsonl" "$folder/page.jsonl" "$folder/snapkv.jsonl" \
  "$folder/page-alone.jsonl" "$folder/snapkv-alone.jsonl"
