# SPDX-License-Identifier: Apache-2.0
"""Writes dequant_blocks.txt: random blocks of each GGUF tensor type and what PyPI's `gguf` makes of them.

    python3 -m pip install gguf==0.19.0
    python3 make_dequant_blocks.py > dequant_blocks.txt

A line: type, bytes of the blocks, bits of the f32 values (little-endian hexadecimal).
"""

import sys

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

# Where the f16 fields of a block are: random bits there would be infinities and NaN now and then.
F16_FIELDS = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
SCALES = [0.0123, -0.5, 3.0e-5, 7.25]


def main() -> None:
    rng = np.random.default_rng(3)
    for name in ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"]:
        kind = GGMLQuantizationType[name]
        elements, size = GGML_QUANT_SIZES[kind]
        if name in F16_FIELDS:
            count = 4 if elements == 32 else 3
            blocks = rng.integers(0, 256, (count, size), dtype=np.uint8)
            for block in range(count):
                for field in F16_FIELDS[name]:
                    scale = np.float16(SCALES[block] * (1 + field))
                    blocks[block, field : field + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        else:
            values = np.array([0, -0.0, 1, -1.5, 3e-5, -6.1e-5, 65504, 1e-7] + list(rng.normal(size=8)), np.float32)
            data = {
                "F32": lambda: values,
                "F16": lambda: values.astype(np.float16),
                "BF16": lambda: (values.view(np.uint32) >> 16).astype(np.uint16),
            }[name]()
            blocks = np.frombuffer(data.tobytes(), np.uint8)
        if name == "F32":
            result = blocks.view(np.float32)
        elif name == "F16":
            result = blocks.view(np.float16).astype(np.float32)
        else:
            result = quants.dequantize(blocks, kind)
        sys.stdout.write(f"{name} {blocks.tobytes().hex()} {result.astype('<f4').tobytes().hex()}\n")


if __name__ == "__main__":
    main()
