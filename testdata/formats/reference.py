"""Random blocks of each weight format and what ggml's own Python package makes of them: writes blocks.json.

    pip install gguf==0.19.0 numpy && python reference.py

Kernels must widen data to exactly f32. Both are base64; floats are little-endian.
"""
import base64
import json

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType as T, quants

# Where in a block its f16 scales lie. The first blocks have scales at the edges.
HALVES = {T.F16: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q8_0: [0],
          T.Q4_K: [0, 2], T.Q5_K: [0, 2], T.Q6_K: [208]}
EDGES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF]

rng = np.random.default_rng(1)
cases = []
for t in [T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K]:
    values, size = GGML_QUANT_SIZES[t]
    n = max(8 if values < 256 else 2, 64 // values)
    data = rng.integers(0, 256, (n, size), dtype=np.uint8)
    for at in HALVES.get(t, []):
        scale = rng.normal(0, 0.02, n).astype(np.float16)
        if n > len(EDGES):
            scale.view(np.uint16)[: len(EDGES)] = EDGES
        data[:, at : at + 2] = scale.view(np.uint8).reshape(n, 2)
    if t == T.BF16:
        data[data[:, 1] & 0x7F == 0x7F, 1] = 0x3F  # no infinity, no NaN
    f32 = quants.dequantize(data.reshape(1, -1), t).astype("<f4")
    encode = lambda a: base64.b64encode(a.tobytes()).decode()
    cases.append({"type": t.name, "data": encode(data), "f32": encode(f32)})
with open("blocks.json", "w") as f:
    f.write("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")
