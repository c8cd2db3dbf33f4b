# SPDX-License-Identifier: Apache-2.0
"""Writes quantised_rows.txt: rows of a cache, quantised and widened by llama.cpp's own Python package (PyPI's `gguf`).

    python3 -m pip install gguf==0.19.0
    python3 make_quantised_rows.py > quantised_rows.txt

A line: format, features of a row, bytes of the rows, bits of the f32 values they widen to (little-endian hexadecimal).
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType, quants

FEATURES = 64


def main() -> None:
    rng = np.random.default_rng(11)
    rows = rng.normal(size=(8, FEATURES)).astype(np.float32)
    rows[1] *= 37  # rows of other sizes
    rows[2] *= 2e-3
    rows[3, 5] = 91  # an outlier
    rows[4] = 0
    rows[5] = np.abs(rows[5])
    rows[6] = -1.25  # all alike
    for name in ["Q8_0", "Q4_0", "Q4_1", "Q5_1"]:
        kind = GGMLQuantizationType[name]
        blocks = quants.quantize(rows, kind)
        values = quants.dequantize(blocks, kind)
        sys.stdout.write(f"{name} {FEATURES} {blocks.tobytes().hex()} {values.astype('<f4').tobytes().hex()}\n")


if __name__ == "__main__":
    main()
