#!/usr/bin/env python3
"""Writes a model in other formats with llama.cpp's quantiser, and beside each the text to compute.

    requantise.py DIR SOURCE.gguf TEXT.txt FORMAT...

The files are DIR/SOURCE-FORMAT.gguf, with the tokens of the text in DIR/SOURCE-FORMAT.ids, in lists of at most the
model's context.
"""
import ctypes
import json
import pathlib
import sys

import llama_cpp

import record

FORMATS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32}


def main():
    llama_cpp.llama_log_set(record.quiet, ctypes.c_void_p(0))
    folder, source, words = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    model = llama_cpp.Llama(str(source), vocab_only=True, verbose=False)
    ids = model.tokenize(words.read_bytes(), special=False)
    size = min(int(model.metadata["llama.context_length"]), 2048)
    texts = [ids[i : i + size] for i in range(0, min(len(ids), 2048), size)]
    for name in sys.argv[4:]:
        path = folder / f"{source.stem.split('.')[0]}-{name}.gguf"
        record.quantise(source, path, FORMATS[name])
        path.with_suffix(".ids").write_text(json.dumps(texts))
        print(path, path.stat().st_size, "bytes", flush=True)


if __name__ == "__main__":
    main()
