#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the kernels, without a GPU, against a committed table: their PTX, and what ptxas makes of it.

usage: ptx_shape.py TABLE FILE.ptx...
       ptx_shape.py --ptxas PTXAS [--renew] TABLE FILE.ptx...

A rule of the table, written by hand, names entry points (a regular expression on the mangled name) and counts of instructions:

    move_kernelILb1E   ld.global.v4>=4  st.global.v4>=4  st.global.u8=0  ld.local=0

An instruction matches where its mnemonic starts with the given text; `*` stands for any characters. Every rule must match
at least one entry of every file. `dynamic=BYTES` is no count: so much dynamic shared memory has a block of these kernels.

With --ptxas, the numbers of every kernel are compared: registers, bytes of spills, static shared memory, blocks that one
multiprocessor holds at a time, vector loads and stores. None may be worse than in the table. They are those of one nvcc: with
another, nothing is compared and the exit status is 77. --renew writes them into the table.
"""

import concurrent.futures
import os
import re
import subprocess
import sys

HEADING = """
# --- Numbers of every kernel, by exactly this nvcc; written by tests/checks/ptx_shape.py --renew. ---
# bytes of spills; bytes of static shared memory; blocks that a multiprocessor holds; vector loads, vector stores
"""
# name, and whether more of it is worse
NUMBERS = (("registers", True), ("spills", True), ("shared", True), ("blocks", False), ("loads", False), ("stores", False))
# shared memory of a multiprocessor; both have 65,536 registers, 64 warps and 32 blocks, and keep 1 KiB of each block
SHARED = {"sm_80": 164 * 1024, "sm_90": 228 * 1024}


class Entry:
    """One kernel in one file."""

    def __init__(self):
        self.mnemonics = []
        self.threads = 0


class Ptx:
    """One file: its kernels by mangled name, its architecture and the nvcc that wrote it."""

    def __init__(self, path):
        self.path = path
        self.entries = {}
        self.nvcc = self.architecture = ""
        entry = None
        with open(path, encoding="utf-8") as file:
            for line in file:
                if found := re.match(r"// Cuda compilation tools, release (\d+\.\d+)", line):
                    self.nvcc = found.group(1)
                elif found := re.match(r"\.target\s+(sm_\d+)", line):
                    self.architecture = found.group(1)
                elif found := re.search(r"\.entry\s+(\S+?)\(", line):
                    entry = self.entries[found.group(1)] = Entry()
                elif entry and (found := re.match(r"\.maxntid\s+(\d+)", line)):
                    entry.threads = int(found.group(1))
                elif line.startswith("}"):
                    entry = None
                elif entry and (found := re.match(r"\s+(?:@!?%\w+\s+)?([a-z]\S*)", line)):
                    entry.mnemonics.append(found.group(1).rstrip(";"))


def short_name(mangled):
    """The kernel's own name and its mangled template arguments."""
    at, name = 3, mangled
    while mangled.startswith("_ZN") and mangled[at].isdigit():
        length = re.match(r"\d+", mangled[at:]).group()
        name = mangled[at + len(length) : at + len(length) + int(length)]
        at += len(length) + int(length)
    rest = mangled[at:]
    return name + (rest[: rest.index("EEv")] if rest.startswith("I") and "EEv" in rest else "")


def count(mnemonics, pattern):
    expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    return sum(1 for m in mnemonics if expression.match(m))


def read_table(path):
    """Rules, the nvcc of the numbers, the numbers by (architecture, kernel), and the text before them."""
    rules, nvcc, numbers = [], "", {}
    with open(path, encoding="utf-8") as file:
        text = file.read()
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        if words[0] == "nvcc":
            nvcc = words[1]
        elif words[0].startswith("sm_"):
            numbers[words[0], words[1]] = {k: int(v) for k, v in zip(words[2::2], words[3::2])}
        else:
            rules.append((words[0], words[1:]))
    return rules, nvcc, numbers, text.split(HEADING.strip().splitlines()[0])[0].rstrip() + "\n"


def check_rules(rules, files):
    faults = checks = 0
    for name, conditions in rules:
        for ptx in files:
            matching = [e for e in ptx.entries if re.search(name, e)]
            if not matching:
                faults += 1
                print(f"{ptx.path}: no entry matches {name}")
            for entry in matching:
                for condition in conditions:
                    pattern, relation, number = re.match(r"(.+?)(>=|<=|=)(\d+)$", condition).groups()
                    if pattern == "dynamic":
                        continue
                    n, limit = count(ptx.entries[entry].mnemonics, pattern), int(number)
                    checks += 1
                    if not {">=": n >= limit, "<=": n <= limit, "=": n == limit}[relation]:
                        faults += 1
                        print(f"{ptx.path}: {entry}: {pattern} is there {n} times, not {relation}{number}")
    print(f"ptx_shape: {checks} counts in {len(files)} files, {faults} wrong")
    return 1 if faults or not checks else 0


def blocks_a_multiprocessor(architecture, threads, registers, shared):
    """How many blocks fit, as NVIDIA's occupancy calculator counts."""
    warps = (threads + 31) // 32
    a_warp = (registers * 32 + 255) // 256 * 256
    by_registers = 65536 // a_warp // 4 * 4 // warps
    by_shared = SHARED[architecture] // ((shared + 1024 + 127) // 128 * 128)
    return min(32, 64 // warps, by_registers, by_shared)


def measure(ptxas, ptx, rules):
    """The numbers of every kernel of a file, by (architecture, kernel)."""
    command = [ptxas, "-v", f"-arch={ptx.architecture}", ptx.path, "-o", os.devnull]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    numbers, entry, spills = {}, "", 0
    for line in (said.stdout + said.stderr).splitlines():
        if found := re.search(r"Compiling entry function '(\S+)'", line):
            entry = found.group(1)
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(found.group(1)) + int(found.group(2))
        elif found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            kernel = ptx.entries[entry]
            if kernel.threads == 0:
                sys.exit(f"ptx_shape: {entry} has no launch bounds: how many blocks fit is not known")
            n = {"registers": int(found.group(1)), "spills": spills, "shared": int(shared.group(1)) if shared else 0}
            dynamic = sum(int(c.split("=")[1]) for name, conditions in rules if re.search(name, entry)
                          for c in conditions if c.startswith("dynamic="))
            n["blocks"] = blocks_a_multiprocessor(ptx.architecture, kernel.threads, n["registers"], n["shared"] + dynamic)
            n["loads"] = sum(1 for m in kernel.mnemonics if re.match(r"ld\.(?!param|local).*\.v[248]\.", m))
            n["stores"] = sum(1 for m in kernel.mnemonics if re.match(r"st\.(?!local).*\.v[248]\.", m))
            name = short_name(entry)
            if (ptx.architecture, name) in numbers:
                sys.exit(f"ptx_shape: two kernels are called {name}")
            numbers[ptx.architecture, name] = n
    missing = len(ptx.entries) - len(numbers)
    if missing:
        sys.exit(f"ptx_shape: ptxas said nothing of {missing} kernels of {ptx.path}")
    return numbers


def check_numbers(ptxas, table, files, renew):
    rules, nvcc, wanted, head = read_table(table)
    now = {ptx.nvcc for ptx in files}
    if len(now) != 1:
        sys.exit(f"ptx_shape: files by several nvcc: {', '.join(sorted(now))}")
    if not renew and now != {nvcc}:
        print(f"ptx_shape: skipped: the numbers in {table} are those of nvcc {nvcc or '(none)'}, this is {now.pop()}")
        return 77
    numbers = {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for measured in pool.map(lambda ptx: measure(ptxas, ptx, rules), files):
            numbers.update(measured)
    if renew:
        width = max(len(name) for _, name in numbers)
        with open(table, "w", encoding="utf-8") as file:
            file.write(head + HEADING + f"nvcc {now.pop()}\n")
            for (architecture, name), n in sorted(numbers.items(), key=lambda x: (x[0][1], x[0][0])):
                file.write(f"{architecture} {name:{width}} " + " ".join(f"{k} {n[k]}" for k, _ in NUMBERS) + "\n")
        print(f"ptx_shape: {table}: {len(numbers)} kernels")
        return 0
    worse = better = 0
    for key in sorted(wanted.keys() | numbers.keys()):
        if key not in wanted or key not in numbers:
            worse += 1
            print(f"{' '.join(key)}: " + ("not in the table" if key in numbers else "in the table, but there is no such kernel"))
            continue
        for name, more_is_worse in NUMBERS:
            was, is_now = wanted[key].get(name, 0), numbers[key][name]
            if was == is_now:
                continue
            bad = (is_now > was) == more_is_worse
            worse, better = worse + bad, better + (not bad)
            print(f"{' '.join(key)}: {name} {was} -> {is_now}, {'worse' if bad else 'better'}")
    print(f"ptx_shape: {len(numbers)} kernels, {worse} numbers worse, {better} better")
    if worse or better:
        print("If that is meant, renew the table and say why in the commit:\n"
              f"  tests/checks/ptx_shape.py --ptxas {ptxas} --renew {table} {' '.join(ptx.path for ptx in files)}")
    return 1 if worse or not numbers else 0


def main():
    arguments, ptxas, renew = sys.argv[1:], None, False
    while arguments and arguments[0].startswith("--"):
        option = arguments.pop(0)
        if option == "--ptxas" and arguments:
            ptxas = arguments.pop(0)
        elif option == "--renew":
            renew = True
        else:
            sys.exit(__doc__)
    if len(arguments) < 2 or (renew and not ptxas):
        sys.exit(__doc__)
    files = [Ptx(path) for path in arguments[1:]]
    if ptxas:
        return check_numbers(ptxas, arguments[0], files, renew)
    return check_rules(read_table(arguments[0])[0], files)


if __name__ == "__main__":
    sys.exit(main())
