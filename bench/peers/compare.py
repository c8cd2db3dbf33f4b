#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvtrim compared with kvpress, on the same data, shapes and threads, alternately in one run.

Run by hand, never in CI (the environment takes about 6 GB):

    python3 -m venv peers && peers/bin/pip install -r bench/peers/requirements.txt
    cmake --preset bench && cmake --build build/bench --target kvtrim_peer
    peers/bin/python bench/peers/compare.py build/bench/bench/kvtrim_peer

One layer shaped like Llama-3-8B: 32 query heads, 8 KV heads, head dim 128, window 32. Like kvtrim, kvpress is given the
window's queries ready-made: its query projection is not timed. Everything else is: score, selection, and the copy (kvpress)
or the move (kvtrim) of what stays, tables included.
"""

import argparse
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy
import torch
from kvpress import KeyDiffPress, KnormPress, ObservedAttentionPress, SnapKVPress
from kvpress.presses import snapkv_press

HEADS, KV_HEADS, DIM, WINDOW = 32, 8, 128, 32


def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(field)


def peak_of(f):
    """Seconds of f(), and how far memory rose above where it began.

    With one thread the process's own time counts, here and in kvtrim_peer: deaf to others on the machine."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    begin = clock()
    result = f()
    seconds = clock() - begin
    peak = max(0, status("VmHWM") - before)
    del result
    return seconds, peak


class Peer:
    """The program kvtrim_peer, kept running."""

    def __init__(self, program, folder, method, dtype, tokens, keep, threads):
        arguments = [program, folder, method, dtype, tokens, keep, threads]
        self.process = subprocess.Popen(
            [str(a) for a in arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        ready = self.process.stdout.readline().split()
        self.workspace = int(ready[1]) if ready else None  # None: the program does not know the method

    def run(self):
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline().split()[0])

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def compare(options, method, press, dtype, tokens):
    generator = torch.Generator().manual_seed(tokens)
    number = torch.float32 if dtype == "f32" else torch.bfloat16
    keys, values = (torch.randn(1, KV_HEADS, tokens, DIM, generator=generator).to(number) for _ in range(2))
    queries = torch.randn(1, HEADS, WINDOW, DIM, generator=generator).to(number)
    module = SimpleNamespace(
        config=SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS), head_dim=DIM, layer_idx=0)
    hidden = torch.empty(1, tokens, 1, dtype=number)
    unturned = torch.ones(1, tokens, DIM, dtype=number), torch.zeros(1, tokens, DIM, dtype=number)
    snapkv_press.get_prerope_query_states = lambda *_: queries
    keep = int(tokens * (1 - press.compression_ratio))

    def compress():
        return press.compress(module, hidden, keys, values, None, {"position_embeddings": unturned})

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name, tensor in ("keys", keys), ("values", values):
            bits = tensor.view(torch.int16) if number == torch.bfloat16 else tensor
            bits.numpy().tofile(f"{folder}/{name}.bin")
        queries.float().numpy().tofile(f"{folder}/queries.bin")
        peer = Peer(options.program, folder, method, dtype, tokens, keep, options.threads)
        if peer.workspace is None:
            peer = None
        else:
            peer.run()
        compress()
        theirs, ours, ratios, peak = [], [], [], 0
        for _ in range(options.pairs):
            seconds, memory = peak_of(compress)
            theirs.append(seconds)
            peak = max(peak, memory)
            if peer is not None:
                ours.append(peer.run())
                ratios.append(seconds / ours[-1])
        same = ""
        if peer is not None:
            kept = numpy.fromfile(f"{folder}/kept.bin", dtype=numpy.int32).reshape(KV_HEADS, keep)
            scores = press.score(module, hidden, keys, values, None, {"position_embeddings": unturned})
            best = scores.topk(keep, dim=-1).indices[0].numpy()
            common = sum(len(numpy.intersect1d(kept[h], best[h])) for h in range(KV_HEADS))
            same = f"{100 * common / best.size:.2f} %"
            peer.close()

    name = type(press).__name__.removesuffix("Press")
    line = f"{name:<10} {dtype:<5} {tokens:>7} {statistics.median(theirs) * 1e3:>10.1f}"
    if ours:
        low, high = (numpy.quantile(ratios, q) for q in (0.25, 0.75))
        line += (f" {statistics.median(ours) * 1e3:>10.1f} {statistics.median(ratios):>7.1f}x ({low:.1f}-{high:.1f})"
                 f" {peak / 2**20:>9.0f} {peer.workspace / 2**20:>9.0f}   {same}")
    else:
        line += f" {'-':>10} {'':>19} {peak / 2**20:>8.0f}"
    print(line, flush=True)


def observed(options):
    """kvpress's H2O-like press is handed the whole attention matrix; kvtrim sums columns tile by tile."""
    print("\nObservedAttention needs attention [32, n, n] in memory before it can score:")
    available = next(int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines()
                     if line.startswith("MemAvailable"))
    module = SimpleNamespace(
        config=SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS), head_dim=DIM)
    for tokens in 1024, 2048, 4096, 8192, 16384, 32768:
        needed = HEADS * tokens * tokens * 4
        if needed > 0.6 * available:
            print(f"  {tokens:>6} tokens: {needed / 2**30:>6.1f} GiB, more than this machine has to spare")
            continue
        attention = torch.full((1, HEADS, tokens, tokens), 1 / tokens)
        keys = torch.empty(1, KV_HEADS, tokens, DIM)
        seconds = peak_of(lambda: ObservedAttentionPress(0.75).score(module, None, keys, keys, attention, {}))[0]
        print(f"  {tokens:>6} tokens: {needed / 2**30:>6.1f} GiB, summed in {seconds * 1e3:.0f} ms")
        del attention


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="kvtrim_peer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=7, help="runs of each side")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"kvpress {version('kvpress')}, torch {torch.__version__},"
          f" {options.threads} thread(s), 75 % removed, medians of {options.pairs} pairs")
    print(f"{'method':<10} {'dtype':<5} {'tokens':>7} {'kvpress ms':>10} {'kvtrim ms':>10} {'ratio (quartiles)':>19}"
          f" {'peak MiB':>9} {'kvtrim':>9}   same rows")
    for tokens in options.tokens:
        for dtype in "f32", "bf16":
            compare(options, "snapkv", SnapKVPress(0.75, window_size=WINDOW), dtype, tokens)
            compare(options, "keydiff", KeyDiffPress(0.75), dtype, tokens)
            compare(options, "knorm", KnormPress(0.75), dtype, tokens)
    observed(options)


if __name__ == "__main__":
    main()
