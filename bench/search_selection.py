#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Searches the parameters of a policy on prompts of another seed than the suite's.

Tune here, report on the suite: bench/README.md has what was found. `evaluate` asks the questions; a line per policy and size, best
first. What is in --out is not asked again, so that this can be stopped, and other SPECs can be added.

  python3 bench/search_selection.py --programs build/demo/examples --model M.gguf --out search.jsonl --grid pages
"""

import argparse
import itertools
import json
import pathlib
import subprocess

# Each grid: when the question is read, and SPECs. {a,b} are alternatives.
GRIDS = {
    "rows": (
        "known",
        [
            "snapkv:sinks={0,4},kernel={5,7,11,15,21},pool={avg,max},rows={mean,max},group={mean,max},columns=all",
        ],
    ),
    "pages": (
        "known",
        [
            "page:unit={layer,group},rows={mean,max},group={mean,max},kernel={1,5,9},reduce={max,mean,top}",
            "page:unit={layer,group},norm={none,sum},heads={sum,max},window={16,32,64}",
        ],
    ),
    "later": (
        "later",
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


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Other options go to evaluate: --suite standard, --task key_value, --removed 0.95 ...")
    parser.add_argument("--programs", type=pathlib.Path, required=True, help="folder of evaluate")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="results, JSON lines")
    parser.add_argument("--grid", choices=sorted(GRIDS), default="pages", help="what to search")
    parser.add_argument("--policy", action="append", help="SPECs to try instead of the grid's; {a,b} are alternatives")
    parser.add_argument("--question", choices=["known", "later"], help="at the cut, instead of the grid's")
    parser.add_argument("--seed", type=int, default=7, help="of the prompts (default %(default)s; the suite's is 0)")
    args, others = parser.parse_known_args()

    question, specs = GRIDS[args.grid]
    question = args.question or question
    specs = list(dict.fromkeys(s for spec in (args.policy or specs) for s in expand(spec)))
    if not any(o.startswith("--task") for o in others):
        others += ["--task", "needle_number", "needle_word", "needle_name"]
    subprocess.run([args.programs / "evaluate", "--model", args.model, "--out", args.out, "--seed", str(args.seed),
                    *others, "--policy", *specs], check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in args.out.read_text().splitlines()]
    dropped = {(line["task"], line["length"]) for line in lines if line["kind"] == "task" and line["dropped"]}
    found = {}
    for line in lines:
        task = line.get("task"), line.get("length")
        if line["kind"] == "answer" and line["question"] == question and line["policy"] in specs and task not in dropped:
            found.setdefault((line["removed"], line["policy"]), {}).setdefault(task, []).append(line["score"])
    for (removed, policy), tasks in sorted(found.items(), key=lambda item: (
            item[0][0] or 0, -sum(map(sum, item[1].values())) / sum(map(len, item[1].values())))):
        counts = "  ".join(f"{task} {length}: {sum(scores):g}/{len(scores)}" for (task, length), scores in tasks.items())
        print(f"{'' if removed is None else format(removed, '.2f'):>5}  {counts}  {policy}")


if __name__ == "__main__":
    main()
