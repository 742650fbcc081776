#!/usr/bin/env python3
"""Records what llama.cpp computes from model files.

    record.py OUT.json FILE.gguf...      each FILE.gguf with texts to compute in FILE.ids, JSON: lists of tokens

For each file, two kinds of arithmetic:

- f32: weights dequantised to an F32 file by llama.cpp's own quantiser, f32 activations, f32 KV, no flash attention.
  What an engine's exact mode must give.
- native: the file as it is, f16 KV: activations rounded as the weights' format has it. Only how far it is from the
  first is kept: two correct engines round differently.

Of each: "nll", negative log-likelihoods of all tokens of a text but its first, in batches of 512, text after text. Of
f32 also "logits" at the positions POSITIONS of the first text, the first PROMPT tokens in one batch, the rest one by one
after the cached context, where the vocabulary is small. Arrays are little-endian float32 in base64.
"""
import base64
import ctypes
import hashlib
import json
import os
import pathlib
import sys
import tempfile

import llama_cpp
import numpy as np

PROMPT, POSITIONS = 70, [0, 1, 33, 69, 70, 71, 75]
F32, F16 = 0, 1


@llama_cpp.llama_log_callback
def quiet(level, text, data):
    if level >= 4:
        sys.stderr.write(text.decode())


def quantise(source, target, ftype, **fields):
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = ftype, True, 2
    for k, v in fields.items():
        setattr(params, k, v)
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), params) != 0:
        sys.exit(f"{source}: cannot be quantised")


def load(path, n, kv):
    return llama_cpp.Llama(str(path), n_ctx=n, n_batch=512, n_ubatch=512, n_threads=2, n_threads_batch=2, logits_all=True,
                           type_k=kv, type_v=kv, flash_attn=False, verbose=False)


def nll(llama, texts):
    out = []
    for ids in texts:
        llama.reset()
        llama.eval(ids)
        for row, token in zip(llama.scores, ids[1:]):
            row = row.astype(np.float64)
            out.append(row.max() + np.log(np.exp(row - row.max()).sum()) - row[token])
    return np.array(out)


def logits(llama, ids):
    llama.reset()
    llama.eval(ids[:PROMPT])
    for token in ids[PROMPT : POSITIONS[-1] + 1]:
        llama.eval([token])
    return np.asarray(llama.scores[POSITIONS])


def short(x):
    return float(f"{x:.6g}")


def text(array):
    return base64.b64encode(np.asarray(array, dtype="<f4").tobytes()).decode()


def record(path, texts):
    n = max(map(len, texts))
    with tempfile.TemporaryDirectory(dir=path.parent) as tmp:
        wide = pathlib.Path(tmp) / "wide.gguf"
        quantise(path, wide, F32)
        llama = load(wide, n, F32)
        exact = nll(llama, texts)
        out = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "nll": text(exact)}
        if llama.n_vocab() < 1000:
            out["logits"] = text(logits(llama, texts[0]))
        del llama
    native = nll(load(path, n, F16), texts)
    far = np.abs(native - exact)
    out["native"] = {"mean": short(far.mean()), "p99": short(np.quantile(far, 0.99)), "max": short(far.max()),
                     "perplexity": short(np.exp(native.mean()))}
    out["perplexity"] = short(np.exp(exact.mean()))
    return out


def main():
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    out = {"about": "Written by scripts/llamacpp/record.py, which says what is in it.",
           "llama_cpp_python": llama_cpp.__version__, "prompt": PROMPT, "positions": POSITIONS, "models": {}}
    for path in map(pathlib.Path, sys.argv[2:]):
        r = out["models"][path.stem] = record(path, json.loads(path.with_suffix(".ids").read_text()))
        print(path.stem, "perplexity", r["perplexity"], "native", r["native"], flush=True)
    lines = json.dumps(out, separators=(",", ":")).replace('"models":{', '"models":{\n').replace('},"', '},\n"')
    pathlib.Path(sys.argv[1]).write_text(lines + "\n")


if __name__ == "__main__":
    main()
