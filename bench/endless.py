#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Endless generation, measured: StreamingLLM past the model's context, beside what it replaces.

`generate --teacher` reads a text token by token in three ways (sinks and a window renumbered in the cache; the window alone; the
plain cache, past the context for which the model was trained); windows of it are read anew, each at once. Each run leaves a file in
--work and is not repeated, so that this can be stopped and started again. Then come a table and, in --json, JSON lines:
bench/README.md says what they hold.
"""
import argparse
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys

CONTEXT = 8192  # of the model
# Policy, options, and tokens at most: what has become of the two others is seen by then.
RUNS = {"streaming": ("streaming:sinks=4,budget=1024,form=pages", ["--in-cache"], None),
        "no sinks": ("streaming:sinks=0,budget=1024,form=pages", ["--in-cache"], 8000),
        "plain cache": ("full", ["--beyond-context"], CONTEXT + 1000)}


def read_lines(path):
    """JSON lines; the error names the line."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
                line["kind"]
            except (ValueError, KeyError, TypeError) as error:
                sys.exit(f"endless.py: {path} line {number}: {error!r}")
            lines.append(line)
    return lines


def tokens_of(path, count):
    tokens = [line for line in read_lines(path) if line["kind"] == "generate_token"]
    if len(tokens) != count:
        sys.exit(f"endless.py: {path} has {len(tokens)} tokens, expected {count}")
    for number, token in enumerate(tokens):
        if not {"seen", "token", "surprisal", "pages", "resident_bytes", "ms"} <= token.keys():
            sys.exit(f"endless.py: {path} line {number + 2}: a field is missing")
    return tokens


def run(command, result):
    """Runs a program that writes `result` as a whole or not at all; not again if it is there."""
    if result.exists():
        return
    print("+", " ".join(map(str, command)), flush=True)
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)


def recomputed(args, ids, windows, length, predicted):
    """Surprisal of the last tokens of each window, read anew: {end: mean}. One process per window."""
    means = {}
    for i in range(windows):
        first = args.warm + predicted
        end = first + (len(ids) - first) * i // (windows - 1)
        window, rest, trace = (args.work / f"window-{end}{part}.jsonl" for part in ("", "-rest", "-trace"))
        window.write_text(json.dumps({"ids": ids[end - length:end - predicted]}))
        rest.write_text(json.dumps({"ids": ids[end - predicted:end]}))
        run([args.programs / "generate", "--model", args.model, "--prompt-file", window, "--teacher", rest,
             "--tokens", predicted, "--policy", "full", "--threads", args.threads, "--trace", trace], trace)
        means[end] = statistics.fmean(token["surprisal"] for token in tokens_of(trace, predicted))
    return means


def bootstrap(differences, draws=10000):
    """95 % interval of the mean, over windows."""
    rng = random.Random(1)
    means = sorted(statistics.fmean(rng.choices(differences, k=len(differences))) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=pathlib.Path, required=True, help="folder of generate")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--text", required=True, help="a text of more than --tokens tokens")
    parser.add_argument("--work", type=pathlib.Path, required=True, help="folder for what each run leaves")
    parser.add_argument("--json", type=pathlib.Path, help="the summary, as JSON lines")
    parser.add_argument("--tokens", type=int, default=12000)
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--warm", type=int, default=1100, help="tokens before anything is compared")
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    length, predicted = 1024, 20

    runs = {}
    for name in dict.fromkeys(["streaming", *args.runs]):
        policy, more, most = RUNS[name]
        count = min(args.tokens, most or args.tokens)
        trace = args.work / (name.replace(" ", "-") + ".jsonl")
        run([args.programs / "generate", "--model", args.model, "--teacher", args.text, "--tokens", count,
             "--policy", policy, *more, "--threads", args.threads, "--trace", trace], trace)
        runs[name] = tokens_of(trace, count)

    # Position p of the text is predicted by token p - 1 of a trace: the first token is the prompt.
    ids = [None] + [token["token"] for token in runs["streaming"]]
    windows = recomputed(args, ids, args.windows, length, predicted)
    lines = []
    print(f"\n{'':12} pages after {args.warm:,}   MiB resident   perplexity   after {args.warm:,}   after {CONTEXT:,}   ms a token: early, late")
    for name, tokens in runs.items():
        steady = tokens[args.warm:-1]  # of the last token nothing is computed
        pages = [token["pages"] for token in steady]
        resident = [token["resident_bytes"] for token in steady]
        surprisal = [token["surprisal"] for token in tokens]
        times = [token["ms"] for token in tokens]
        # Pages leave whole, so the count has the period of a page, 16 tokens.
        periodic = all(a == b for a, b in zip(pages, pages[16:]))
        ppl = [math.exp(statistics.fmean(surprisal[start:end])) if len(surprisal) > start else None
               for start, end in ((0, None), (args.warm, None), (CONTEXT, CONTEXT + 1000))]
        early, late = statistics.median(times[args.warm:args.warm + 1000]), statistics.median(times[-1001:-1])
        lines.append({"kind": "endless_run", "run": name, "policy": RUNS[name][0], "tokens": len(tokens),
                      "pages_min": min(pages), "pages_max": max(pages), "pages_constant": periodic,
                      "resident_bytes_min": min(resident), "resident_bytes_max": max(resident),
                      "perplexity": ppl[0], "perplexity_warm": ppl[1], "perplexity_beyond_context": ppl[2],
                      "ms_early": early, "ms_late": late, "cores": os.cpu_count(), "load": os.getloadavg()[0]})
        print(f"{name:12} {min(pages):6} to {max(pages):6}   {max(resident) / 2**20:8.0f}   {ppl[0]:10.3f}   {ppl[1]:10.3f}"
              f"   {ppl[2] or math.nan:10.3f}   {early:6.1f}, {late:6.1f}")
        if name != "plain cache" and not periodic:
            sys.exit(f"endless.py: {name}: pages are not constant after {args.warm} tokens")

    print(f"\nwindows read anew: {len(windows)} of {length} tokens, the last {predicted} of each")
    for name, tokens in runs.items():
        # In nats, window by window: the mean over the same tokens in the run, minus that of the window read anew.
        same = {end: statistics.fmean(tokens[p - 1]["surprisal"] for p in range(end - predicted, end))
                for end in windows if end <= len(tokens) + 1}
        differences = [same[end] - windows[end] for end in same]
        anew = math.exp(statistics.fmean(windows[end] for end in same))
        mean, (low, high) = statistics.fmean(differences), bootstrap(differences)
        ratio = [100 * (math.exp(x) - 1) for x in (mean, low, high)]
        lines.append({"kind": "endless_comparison", "run": name, "windows": len(same), "predictions": predicted * len(same),
                      "perplexity": math.exp(statistics.fmean(same.values())), "perplexity_read_anew": anew,
                      "percent_above": ratio[0], "percent_above_low": ratio[1], "percent_above_high": ratio[2]})
        print(f"{name:12} {math.exp(statistics.fmean(same.values())):10.3f} beside {anew:.3f}: {ratio[0]:+.2f} % ({ratio[1]:+.2f} to {ratio[2]:+.2f})")
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
