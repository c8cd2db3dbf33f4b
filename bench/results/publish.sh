#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# sh bench/results/publish.sh RESULTS PROGRAMS
#
# Commits to the repository what a run of `evaluate` found: RESULTS as standard.jsonl.gz, the README's tables, the pictures of the
# report (those need Debian's chromium, chromium-driver and python3-selenium). PROGRAMS: folder of `report`.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
gzip -9nc "$1" > "$here/results/standard.jsonl.gz.part"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$2/report" --results "$1" --out "$work/report.html"
"$2/report" --results "$1" --markdown > "$work/tables"
# Between the marks in the README.
awk -v tables="$work/tables" '
  /^<!-- end of the tables -->/ { inside = 0; ended = 1 }
  !inside
  /^<!-- the tables that/ { inside = 1; print ""; while ((getline line < tables) > 0) print line; print "" }
  END { exit !ended }' "$here/../README.md" > "$work/README.md"
mv "$here/results/standard.jsonl.gz.part" "$here/results/standard.jsonl.gz"
cp "$work/README.md" "$here/../README.md"
/usr/bin/python3 "$here/report/screenshots.py" "$work/report.html" "$here/report"
