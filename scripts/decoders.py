#!/usr/bin/env python3
"""Converts language models and generates with each package, one table row a checkpoint.

    decoders.py --silane target/debug/silane [--oracle milrun.py] --work DIR CHECKPOINT[=REFERENCE.safetensors] ...

The packages are run by the oracle, an independent executor of ML Programs: the prompt's full chunks through
`prefill`, all else through `decode`, over one state. The stored greedy generation of Transformers is what is expected:

    fp32     logits of the package that holds fp32 weights: largest difference relative to the spread, most of which
             is the cache, which Core ML has in fp16 only
    PSNR     logits of the fp16 package in fp16, in dB
    tokens   how many of the generated tokens are the same, in fp16
    argmax   the same of a package that gives the likeliest token instead of logits
    check    problems that coremltools and the oracle's checks find in both
    same     whether a second conversion, with another number of threads, gives the same bytes

Without an oracle the packages are only loaded.
"""

import importlib.util
import sys

import numpy as np
from encoders import PASS, Refused, convert, main, same_tree
from safetensors.numpy import load_file

COLUMNS = {"fp32": 8, "PSNR": 6, "tokens": 6, "argmax": 6, "check": 5, "same": 4}
CHUNK = 4
# The oracle rounds what is cast to the fp16 cache in fp32 too; `matrix.py`, where nothing is rounded, holds 1e-4.
FP32_WITH_CACHE = 1e-3


def row(outside, folder, reference, work):
    """Whether all is well, and the cells."""
    tensors = load_file(reference)
    prompt, expected = tensors["greedy.prompt_ids"][0], tensors["greedy.token_ids"][0]
    context = -(-(len(prompt) + len(expected)) // 32) * 32
    half, again, full, best = (work / f"{n}.mlpackage" for n in ("half", "again", "full", "best"))
    flags = ("--context-length", context, "--prefill-chunk", CHUNK)
    convert(outside, folder, half, "1", *flags)
    convert(outside, folder, again, "2", *flags)
    convert(outside, folder, full, "2", "--precision", "fp32", *flags)
    convert(outside, folder, best, "1", "--logits", "argmax", *flags)
    same = same_tree(half, again)
    problems = outside.problems(half) + outside.problems(best)
    good = same and not problems
    cells = ["-", "-", "-", "-", str(len(problems)), "yes" if same else "NO"]
    if outside.oracle:
        logits = tensors["greedy.logits"].astype(np.float64)
        spread = np.ptp(logits)
        runs = (full, "fp32", "logits"), (half, "fp16", "logits"), (best, "fp16", "token_ids")
        exact, rounded, chosen = (generate(outside, p, prompt, expected, f, o) for p, f, o in runs)
        error = np.abs(exact - logits).max() / spread
        noise = np.sqrt(np.square(rounded - logits).mean())
        psnr = 20 * np.log10(spread / max(noise, 1e-30))
        tokens = int((rounded.argmax(-1) == expected).sum())
        argmax = int((chosen[:, 0] == expected).sum())
        good = bool(good and error <= FP32_WITH_CACHE and psnr >= PASS["psnr"]
                    and tokens == argmax == len(expected))
        cells[:4] = [f"{error:.1e}", f"{psnr:.1f}", f"{tokens}/{len(expected)}", f"{argmax}/{len(expected)}"]
    return good, cells


def generate(outside, path, prompt, expected, precision, output):
    """An output's last row at each generated token, the expected ones being fed."""
    package = executor(outside.oracle).Package(path)
    state = package.make_state("decode")

    def step(function, ids, position):
        feeds = {"input_ids": ids[None], "position_ids": np.arange(position, position + len(ids))[None]}
        feeds = {name: value.astype(np.int32) for name, value in feeds.items()}
        value = package.predict(feeds, state, function, precision)[output]
        return value.reshape(-1, value.shape[-1])[-1].astype(np.float64)

    ids = np.concatenate([prompt, expected])
    prefilled = (len(prompt) - 1) // CHUNK * CHUNK
    for position in range(0, prefilled, CHUNK):
        step("prefill", ids[position:position + CHUNK], position)
    logits = [step("decode", ids[position:position + 1], position) for position in range(prefilled, len(ids) - 1)]
    return np.stack(logits[-len(expected):])


def executor(path):
    if "oracle" not in sys.modules:
        spec = importlib.util.spec_from_file_location("oracle", path)
        sys.modules["oracle"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["oracle"])
    return sys.modules["oracle"]


if __name__ == "__main__":
    sys.exit(main(__doc__, COLUMNS, row))
