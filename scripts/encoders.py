#!/usr/bin/env python3
"""Converts encoder checkpoints and proves each package, one table row a checkpoint.

    encoders.py --silane target/debug/silane --oracle PATH/milrun.py --work DIR CHECKPOINT[=REFERENCE.safetensors] ...

For each checkpoint with stored inputs and outputs of Transformers (`reference.safetensors` in its folder unless
named) the columns are:

    own      silane's reference against Transformers: largest difference relative to the output's spread
    fp32     the package that holds fp32 weights, interpreted, the same measure: the graph's own error
    f16w32   the fp16 package interpreted in fp32: what rounding the weights costs, the same measure
    PSNR     the fp16 package interpreted in fp16, in dB
    check    problems that coremltools and the oracle's checks find
    oracle   largest difference between `silane run` and the oracle's run in fp16, in units of the last
             place of the output's largest value
    same     whether a second conversion, with another number of threads, gives the same bytes

Needs a Python with coremltools 9.0, numpy 1.26.4 and safetensors.
"""

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

PASS = {"own": 1e-5, "fp32": 1e-4, "psnr": 50.0}


def run(*command, env=None, ok=(0,)):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env={**os.environ, **(env or {})})
    if done.returncode not in ok:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def same_tree(a, b):
    files = sorted(p.relative_to(a) for p in a.rglob("*") if p.is_file())
    if files != sorted(p.relative_to(b) for p in b.rglob("*") if p.is_file()):
        return False
    return all(filecmp.cmp(a / f, b / f, shallow=False) for f in files)


def worst(report):
    return max(o["relative"] for o in report["outputs"])


def row(a, folder, reference, work):
    tensors = load_file(reference)
    shape = tensors["input_ids"].shape
    convert = [a.silane, "convert", folder, "--force", "--no-tokenizer", "--json", "--batch", shape[0],
               "--sequence-length", shape[1]]
    if "token_type_ids" in tensors:
        convert.append("--token-type-ids")
    half, again, full = (work / f"{n}.mlpackage" for n in ("half", "again", "full"))
    run(*convert, "-o", half, env={"RAYON_NUM_THREADS": "1"})
    run(*convert, "-o", again, env={"RAYON_NUM_THREADS": "2"})
    run(*convert, "-o", full, "--precision", "fp32")
    same = same_tree(half, again)

    def validate(what, *flags):
        return json.loads(run(a.silane, "validate", what, "--reference", reference, "--json", *flags, ok=(0, 1)))

    own = worst(validate(folder))
    fp32 = worst(validate(full, "--precision", "fp32"))
    f16w32 = worst(validate(half, "--precision", "fp32"))
    psnr = min(o["psnr"] for o in validate(half)["outputs"])

    feeds = work / "feeds.safetensors"
    inputs = {"input_ids", "attention_mask"} | ({"token_type_ids"} & set(tensors))
    given = {k: tensors[k].astype(np.int32) for k in inputs if k in tensors}
    given.setdefault("attention_mask", np.ones(shape, np.int32))
    save_file(given, feeds)
    ours, theirs = work / "ours.safetensors", work / "theirs.safetensors"
    run(a.silane, "run", half, "--inputs", feeds, "--outputs", ours)
    run(sys.executable, a.oracle, "run", half, "--inputs", feeds, "--out", theirs)
    ours, theirs = load_file(ours), load_file(theirs)
    ulps = 0.0
    for name, y in theirs.items():
        y, x = y.astype(np.float64), ours[name].astype(np.float64)
        if not (np.isfinite(x).all() and x.shape == y.shape):
            raise RuntimeError(f"{name}: not finite, or {x.shape} for {y.shape}")
        ulps = max(ulps, np.abs(x - y).max() / (np.abs(y).max() * 2.0**-11))
    problems = run(sys.executable, a.oracle, "check", half, ok=(0, 1)).strip().splitlines()[-1]
    problems = int(problems.rsplit(": ", 1)[1].split()[0])
    good = own <= PASS["own"] and fp32 <= PASS["fp32"] and psnr >= PASS["psnr"] and problems == 0 and same and ulps < 16
    return good, [f"{own:.1e}", f"{fp32:.1e}", f"{f16w32:.1e}", f"{psnr:.1f}", str(problems), f"{ulps:.1f}",
                  "yes" if same else "NO", "ok" if good else "FAIL"]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--silane", type=Path, required=True)
    p.add_argument("--oracle", type=Path, required=True)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("checkpoints", nargs="+")
    a = p.parse_args()
    print(f"{'checkpoint':<24} {'own':>8} {'fp32':>8} {'f16w32':>8} {'PSNR':>6} {'check':>5} {'oracle':>6} same")
    failed = 0
    for item in a.checkpoints:
        folder, _, reference = item.partition("=")
        folder = Path(folder)
        work = a.work / folder.name
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            good, cells = row(a, folder, Path(reference) if reference else folder / "reference.safetensors", work)
            print(f"{folder.name:<24} {cells[0]:>8} {cells[1]:>8} {cells[2]:>8} {cells[3]:>6} {cells[4]:>5} {cells[5]:>6} "
                  f"{cells[6]:<4} {cells[7]}", flush=True)
        except Exception as e:
            good = False
            print(f"{folder.name:<24} ERROR {e}", flush=True)
        failed += not good
        shutil.rmtree(work, ignore_errors=True)
    print(f"{len(a.checkpoints) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
