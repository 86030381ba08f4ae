#!/usr/bin/env python3
"""Converts language models in every way and validates each package against stored outputs, one row a checkpoint.

    matrix.py SILANE CHECKPOINT ...

A cell is a prefill chunk, a number of parts and a way to update the cache. It shows the largest difference of all
logits from Transformers as a share of their spread (fp32 package, nothing rounded), the fp16 package's PSNR in dB, and
whether all stored greedy tokens came out in both. `silane validate` feeds the rows token by token, by prompts of
lengths around the chunk, and continues greedily. Needs Python only.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

CHUNKS, PARTS, UPDATES = (1, 4, 7, 32), (1, 2, 3), ("slice", "mask")
FP32, PSNR = 1e-4, 50.0


def cell(silane, checkpoint, work, chunk, parts, update):
    """The cell's text, and whether all is well."""
    reports = {}
    for precision in ("fp32", "fp16"):
        package = work / f"{precision}-{chunk}-{parts}-{update}"
        subprocess.run([silane, "convert", checkpoint, "-o", package, "--context-length", "64", "--precision", precision,
                        "--prefill-chunk", str(chunk), "--parts", str(parts), "--cache-update", update,
                        "--no-tokenizer"], check=True, capture_output=True)
        package = package if parts > 1 else package.with_suffix(".mlpackage")
        done = subprocess.run([silane, "validate", package, "--reference", checkpoint / "reference.safetensors",
                               "--precision", precision, "--json"], capture_output=True, text=True)
        if done.returncode == 2:
            return done.stderr.strip(), False
        reports[precision] = json.loads(done.stdout)
    exact = max(o["relative"] for o in reports["fp32"]["outputs"])
    psnr = min(o["psnr"] for o in reports["fp16"]["outputs"])
    texts = [r["greedy"] for r in reports.values()]
    same = all(t["equal"] == t["tokens"] for t in texts)
    return f"{exact:.0e} {psnr:.0f}{'' if same else ' TEXT'}", exact <= FP32 and psnr >= PSNR and same


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    silane, checkpoints = Path(sys.argv[1]).resolve(), [Path(c) for c in sys.argv[2:]]
    ways = list(itertools.product(CHUNKS, PARTS, UPDATES))
    print(f"{'checkpoint':<20} " + " ".join(f"{f'{c}/{p}/{u}':<10}" for c, p, u in ways))
    failed = 0
    for checkpoint in checkpoints:
        row = []
        for way in ways:
            with tempfile.TemporaryDirectory() as work:
                text, good = cell(silane, checkpoint, Path(work), *way)
            row.append(text)
            failed += not good
        print(f"{checkpoint.name:<20} " + " ".join(f"{text:<10}" for text in row), flush=True)
    print(f"{len(checkpoints) * len(ways) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
