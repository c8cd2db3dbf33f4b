#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvtrim's policies compared with kvpress's presses: the same model, the same prompts of the suite, token for token.

Run by hand, never in CI (the environment takes about 6 GB):

    python3 -m venv peers && peers/bin/pip install -r bench/peers/requirements.txt
    cmake --preset demo && cmake --build build/demo --target evaluate
    peers/bin/python bench/peers/evaluate.py --evaluate build/demo/examples/evaluate \\
        --model build/model/SmolLM2-135M-Instruct.Q4_1.gguf --work build/peers

First kvpress's model must give the logits of tests/data/eval/logits.json. Then `evaluate` answers the prompts under kvtrim's
policies (or did so before: --results bench/results/standard.jsonl.gz), and writes them as token ids; kvpress answers those that
were used. Each prompt is read once: an outer press hands every layer's keys and values to all presses. Rows are as many as kvtrim
keeps. What is in --work is not done again.
"""

import argparse
import gzip
import json
import math
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ |= {"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}  # before transformers is read

import torch
from gguf import GGUFReader
from kvpress import KeyDiffPress, ObservedAttentionPress, SnapKVPress, StreamingLLMPress, TOVAPress
from kvpress.presses.base_press import BasePress
from transformers import AutoModelForCausalLM, DynamicCache

# SPEC of kvtrim, and the press by the fraction removed.
PEERS = {
    "snapkv": lambda removed: SnapKVPress(removed, window_size=32, kernel_size=5),
    "h2o:mode=greedy,age=1": lambda removed: ObservedAttentionPress(removed),
    "streaming": lambda removed: StreamingLLMPress(removed, n_sink=4),
    "tova": lambda removed: TOVAPress(removed),
    "keydiff": lambda removed: KeyDiffPress(removed),
}


class Each(BasePress):
    """Shows a prompt to several presses; the cache that the model goes on with stays whole."""

    def __init__(self, presses):
        self.presses = presses
        self.caches = [DynamicCache() for _ in presses]

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        for press, cache in zip(self.presses, self.caches):
            k, v = press.compress(module, hidden_states, keys, values, attentions, kwargs)
            cache.update(k, v, module.layer_idx)
        return keys, values


class Decoder:
    """Token ids to text: byte-level BPE, whose tokens stand for bytes by printable characters."""

    def __init__(self, path):
        field = GGUFReader(path).fields["tokenizer.ggml.tokens"]
        self.tokens = [bytes(field.parts[i]).decode() for i in field.data]
        printable = [b for b in range(256) if chr(b).isprintable() and b not in (32, 160, 173)]
        others = [b for b in range(256) if b not in printable]
        self.bytes = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
        self.ends = {i for i, token in enumerate(self.tokens) if token in ("<|endoftext|>", "<|im_end|>")}

    def text(self, ids):
        return bytes(self.bytes[c] for i in ids for c in self.tokens[i]).decode(errors="replace")


def check_logits(model, path):
    """The two engines must be one model: greatest difference of log-probabilities, and agreement of the likeliest tokens."""
    worst = wrong = clear = 0
    for text in json.loads(path.read_text())["texts"]:
        with torch.inference_mode():
            logs = model(torch.tensor([text["ids"]])).logits[0].log_softmax(-1)
        worst = max(worst, (logs.max(-1).values - torch.tensor(text["top1_logprob"])).abs().max().item())
        for row, top, margin in zip(logs, text["top1"], text["margin"]):
            if margin > 0.01:
                clear += 1
                wrong += row.argmax().item() != top
    print(f"logits: log-probabilities differ by at most {worst:.1e}, {wrong} of {clear} likeliest tokens differ")
    if worst > 1e-3 or wrong:
        sys.exit("evaluate.py: kvpress's model is not the model of logits.json")


def answer(model, decoder, cache, prompt, rest, position):
    """What the model says after `rest`: (output, score, correct), by the rules of `evaluate`."""
    def step(ids, at):
        with torch.inference_mode():
            return model(torch.tensor([ids]), past_key_values=cache,
                         position_ids=torch.arange(at, at + len(ids))[None]).logits[0]

    if "copy" in prompt:
        copy = prompt["copy"]
        best = step(rest + copy[:-1], position)[len(rest) - 1:].argmax(-1).tolist()
        score = sum(a == b for a, b in zip(best, copy)) / len(copy)
        return "", score, score >= 0.75
    made = []
    ids = rest
    for _ in range(prompt["max_tokens"]):
        token = step(ids, position)[-1].argmax().item()
        position += len(ids)
        if token in decoder.ends:
            break
        made.append(token)
        ids = [token]
    text = decoder.text(made)
    right = re.search(f"(?<![A-Za-z0-9]){re.escape(prompt['answer'])}(?![A-Za-z0-9])", text) is not None
    return text, float(right), right


def read_lines(path):
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        return [json.loads(line) for line in file]


def ask_kvpress(args, specs, prompts, decoder, model, out):
    done = set()
    if out.exists():
        done = {(line["prompt"], line["question"]) for line in read_lines(out)}
    begin, asked = time.monotonic(), 0
    for prompt in prompts:
        for question in ("known", "later"):
            if (prompt["id"], question) in done:
                continue
            if args.minutes and time.monotonic() - begin > 60 * args.minutes:
                return
            read, rest = prompt["context"], prompt["question"]
            if question == "known":
                read, rest = read + rest[:-1], rest[-1:]
            rows = len(read)
            sizes = [(spec, removed, max(1, math.floor(rows * (1 - removed) + 0.5 + 1e-9)))
                     for spec in specs for removed in args.removed]
            # kvpress keeps int(rows * (1 - ratio)).
            each = Each([PEERS[spec](1 - (kept + 0.5) / rows) for spec, _, kept in sizes])
            whole = DynamicCache()
            with torch.inference_mode(), each(model):
                model.model(torch.tensor([read]), past_key_values=whole)
            lines = []
            for (spec, removed, kept), cache in zip([("full", 0.0, rows), *sizes], [whole, *each.caches]):
                if cache.get_seq_length() != kept:
                    sys.exit(f"evaluate.py: {spec} kept {cache.get_seq_length()} rows, not {kept}")
                output, score, correct = answer(model, decoder, cache, prompt, rest, rows)
                lines.append({"kind": "answer", "task": prompt["task"], "prompt": prompt["id"], "policy": spec,
                              "removed": removed, "question": question, "output": output, "score": score,
                              "correct": correct, "rows": kept})
            with out.open("a") as file:  # a prompt as a whole, or not at all
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            asked += 1
            print(f"{prompt['id']}, question {question}: {(time.monotonic() - begin) / asked:.1f} s each", flush=True)


def compare(ours, theirs):
    """A line per task, question, policy and size, of the prompts that both have."""
    def key(line):
        return line["task"], line["question"], line["policy"], line["removed"]

    mine = {(*key(line), line["prompt"]): line for line in ours}
    rows = {}
    for line in theirs:
        pair = mine.get((*key(line), line["prompt"]))
        if pair is not None:
            rows.setdefault(key(line), []).append((pair, line))
    print(f"\n{'task':<14} {'question':<8} {'policy':<22} {'removed':>7} {'prompts':>7} {'kvtrim':>6} {'kvpress':>7}"
          f" {'only one':>8} {'same text':>9}")
    for (task, question, policy, removed), pairs in sorted(rows.items()):
        right = [sum(pair[i]["correct"] for pair in pairs) for i in (0, 1)]
        differ = sum(a["correct"] != b["correct"] for a, b in pairs)
        same = sum(a["output"].strip() == b["output"].strip() and a["score"] == b["score"] for a, b in pairs)
        print(f"{task:<14} {question:<8} {policy:<22} {removed:7.2f} {len(pairs):7} {right[0]:6} {right[1]:7} {differ:8} {same:9}")
        yield {"kind": "peer", "task": task, "question": question, "policy": policy, "removed": removed,
               "prompts": len(pairs), "kvtrim": right[0], "kvpress": right[1], "differ": differ, "same": same}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluate", type=Path, required=True, help="the program")
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--work", type=Path, required=True, help="folder for what is done")
    parser.add_argument("--task", nargs="+", default=["key_value", "identifier"], help="of one turn")
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--results", type=Path, help="of evaluate: a whole suite's, instead of asking kvtrim now; may be .gz")
    parser.add_argument("--removed", type=float, nargs="+", default=[0.75, 0.9])
    parser.add_argument("--minutes", type=float, default=0, help="kvpress begins no prompt after so many; 0: all")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the comparison here")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"kvpress {version('kvpress')}, transformers {version('transformers')}, torch {torch.__version__}")
    # Attention weights, which ObservedAttention needs, are to be had from the eager implementation alone.
    model = AutoModelForCausalLM.from_pretrained(
        args.model.resolve().parent, gguf_file=args.model.name, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    check_logits(model, Path(__file__).resolve().parents[2] / "tests/data/eval/logits.json")

    results, prompts, out = (args.work / name for name in ("kvtrim.jsonl", "prompts.jsonl", "kvpress.jsonl"))
    common = [args.evaluate, "--model", args.model, "--task", *args.task]
    if args.results:
        results = args.results
        common += ["--suite", read_lines(results)[0]["suite"]]
    else:
        common += ["--prompts", str(args.prompts)]
        subprocess.run([*common, "--out", results, "--removed", ",".join(map(str, args.removed)), "--threads",
                        str(args.threads), "--policy", *PEERS], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*common, "--write-prompts", prompts], check=True)
    ours = [line for line in read_lines(results) if line["kind"] == "answer"]
    answered = {line["policy"] for line in ours}
    used = {line["prompt"] for line in ours if line["policy"] != "full"}
    asked = []
    for task in args.task:
        asked += [line for line in read_lines(prompts) if line["task"] == task and line["length"] == 1024
                  and line["id"] in used][:args.prompts]
    # Tasks take turns, so that a run that is cut short has some of each.
    asked.sort(key=lambda line: int(line["id"].rsplit("-", 1)[1]))
    ask_kvpress(args, [spec for spec in PEERS if spec in answered], asked, Decoder(args.model), model, out)
    lines = list(compare(ours, read_lines(out)))
    print(f"\ngreatest difference: {max(abs(line['kvtrim'] - line['kvpress']) for line in lines)} answers")
    if args.json:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
