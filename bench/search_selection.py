#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Searches the parameters of a policy on prompts that it makes itself.

Tune here, report on other prompts: bench/README.md has what was found. One line per policy and size, best first.

  python3 bench/search_selection.py --programs build/demo/examples --model M.gguf --text FILE --grid aware
"""

import argparse
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile

# Each grid: a name, the question's place, and SPECs. {a,b} are alternatives.
GRIDS = {
    "aware": (
        "aware",
        [
            "snapkv:sinks={0,4},kernel={5,7,11,15,21},pool={avg,max},rows={mean,max},group={mean,max},columns=all",
        ],
    ),
    "pages": (
        "aware",
        [
            "page:unit={layer,group},rows={mean,max},group={mean,max},kernel={1,5,9},reduce={max,mean,top}",
            "page:unit={layer,group},norm={none,sum},heads={sum,max},window={16,32,64}",
        ],
    ),
    "agnostic": (
        "agnostic",
        [
            "page:score={surprisal,keydiff},unit=group,reduce={max,mean,top},window={16,32},sinks={1,4}",
            "page:score=h2o,unit=group",
        ],
    ),
}


def expand(spec):
    """All SPECs that a SPEC with {alternatives} stands for."""
    parts = []
    while "{" in spec:
        head, rest = spec.split("{", 1)
        inner, spec = rest.split("}", 1)
        parts += [[head], inner.split(",")]
    parts.append([spec])
    return ["".join(p) for p in itertools.product(*parts)]


def run(command):
    print("+", " ".join(command), file=sys.stderr)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", required=True, help="folder of retention and make_needles")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--text", required=True, help="text to hide the facts in")
    parser.add_argument("--grid", choices=sorted(GRIDS), default="pages", help="what to search")
    parser.add_argument("--policy", action="append", help="SPECs to try instead of the grid's; {a,b} are alternatives")
    parser.add_argument("--mode", choices=["aware", "agnostic"], help="instead of the grid's")
    parser.add_argument("--lengths", default="1024:20,2048:10,4096:5", help="tokens:prompts, ... (default %(default)s)")
    parser.add_argument("--removed", default="0.75,0.9", help="fractions removed (default %(default)s)")
    parser.add_argument("--seed", type=int, default=7, help="of the prompts (default %(default)s)")
    parser.add_argument("--at-once", type=int, default=12, help="SPECs a run of retention (memory; default %(default)s)")
    parser.add_argument("--json", help="write all results here")
    args = parser.parse_args()

    mode, specs = GRIDS[args.grid]
    mode = args.mode or mode
    specs = list(dict.fromkeys(s for spec in (args.policy or specs) for s in expand(spec)))
    programs = pathlib.Path(args.programs)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for length, count in (pair.split(":") for pair in args.lengths.split(",")):
            prompts = f"{folder}/{length}.jsonl"
            run([str(programs / "make_needles"), "--model", args.model, "--text", args.text, "--out", prompts,
                 "--length", length, "--count", count, "--seed", str(args.seed + int(length))])
            for first in range(0, len(specs), args.at_once):
                out = f"{folder}/out.jsonl"
                run([str(programs / "retention"), "--model", args.model, "--prompts", prompts, "--mode", mode, "--removed",
                     args.removed, "--json", out, "--policy", *specs[first:first + args.at_once]])
                for line in pathlib.Path(out).read_text().splitlines():
                    row = json.loads(line)
                    found.setdefault((row["policy"], row["removed"]), {})[length] = row
    ranked = sorted(found.items(), key=lambda item: (item[0][1], -sum(r["correct"] / r["prompts"] for r in item[1].values())))
    for (policy, removed), rows in ranked:
        counts = "  ".join(f"{length}: {row['correct']:2d}/{row['prompts']}" for length, row in rows.items())
        print(f"{removed:5.2f}  {counts}  {policy}")
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps([row for rows in found.values() for row in rows.values()], indent=1))


if __name__ == "__main__":
    main()
