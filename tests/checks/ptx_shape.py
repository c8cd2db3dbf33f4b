#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the PTX of the kernels against a committed table.

usage: ptx_shape.py TABLE FILE.ptx...

A line of the table names entry points (a regular expression on the mangled name) and counts of instructions in them:

    move_kernelILb1E   ld.global.v4>=4  st.global.v4>=4  st.global.u8=0  ld.local=0

An instruction matches where its mnemonic starts with the given text; `*` stands for any characters. Every line must match
at least one entry of every file.
"""

import re
import sys


def entries(path):
    """name -> list of mnemonics."""
    found = {}
    name = None
    with open(path, encoding="utf-8") as file:
        for line in file:
            start = re.search(r"\.entry\s+(\S+?)\(", line)
            if start:
                name = start.group(1)
                found[name] = []
            elif line.startswith("}"):
                name = None
            elif name is not None:
                instruction = re.match(r"\s+(?:@!?%\w+\s+)?([a-z]\S*)", line)
                if instruction:
                    found[name].append(instruction.group(1).rstrip(";"))
    return found


def count(mnemonics, pattern):
    expression = re.compile(re.escape(pattern).replace(r"\*", ".*"))
    return sum(1 for m in mnemonics if expression.match(m))


def main():
    table, files = sys.argv[1], sys.argv[2:]
    rules = []
    with open(table, encoding="utf-8") as file:
        for line in file:
            words = line.split("#")[0].split()
            if words:
                rules.append((words[0], words[1:]))
    mnemonics_of = {path: entries(path) for path in files}
    faults = 0
    checks = 0
    for name, conditions in rules:
        for path, found in mnemonics_of.items():
            matching = [e for e in found if re.search(name, e)]
            if not matching:
                faults += 1
                print(f"{path}: no entry matches {name}")
            for entry in matching:
                for condition in conditions:
                    pattern, relation, number = re.match(r"(.+?)(>=|<=|=)(\d+)$", condition).groups()
                    n, limit = count(found[entry], pattern), int(number)
                    checks += 1
                    if not {">=": n >= limit, "<=": n <= limit, "=": n == limit}[relation]:
                        faults += 1
                        print(f"{path}: {entry}: {pattern} is there {n} times, not {relation}{number}")
    print(f"ptx_shape: {checks} counts in {len(files)} files, {faults} wrong")
    return 1 if faults or not checks else 0


if __name__ == "__main__":
    sys.exit(main())
