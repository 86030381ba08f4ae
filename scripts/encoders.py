#!/usr/bin/env python3
"""Converts encoder checkpoints and proves each package, one table row a checkpoint.

    encoders.py --silane target/debug/silane [--oracle milrun.py] --work DIR CHECKPOINT[=REFERENCE.safetensors] ...

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

The oracle is an independent executor of ML Programs; without it the packages are only loaded. A model type that
silane refuses is shown and counts as neither passed nor failed.

Needs a Python with coremltools 9.0, numpy 1.26.4 and safetensors.
"""

import argparse
import filecmp
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("COREMLTOOLS_DISABLE_WARNINGS", "1")

import numpy as np
from safetensors.numpy import load_file, save_file

# coremltools warns of the parts that only a Mac has.
logging.disable(logging.WARNING)

PASS = {"own": 1e-5, "fp32": 1e-4, "psnr": 50.0, "ulps": 16.0}
COLUMNS = {"own": 8, "fp32": 8, "f16w32": 8, "PSNR": 6, "check": 5, "oracle": 6, "same": 4}
HALF_ULP = 2.0**-11


class Refused(Exception):
    """silane says that it does not support the model type."""


class Outside:
    """silane, and the tools that are not silane."""

    def __init__(self, silane, oracle):
        self.silane = silane
        self.oracle = oracle if oracle and oracle.exists() else None

    def problems(self, package):
        """What coremltools and the oracle find wrong."""
        with tempfile.TemporaryDirectory() as directory:
            # coremltools rewrites the manifest of a package that it opens.
            copy = shutil.copytree(package, Path(directory) / package.name)
            if self.oracle is None:
                return load(copy)
            said = run(sys.executable, self.oracle, "check", copy, ok=(0, 1)).splitlines()
            return [line.removeprefix("PROBLEM ") for line in said if line.startswith("PROBLEM ")]

    def difference(self, package, inputs, work, function=None):
        """Largest difference of `silane run` from the oracle's run, relative to each output's largest value."""
        given, ours, theirs = (work / f"{n}.safetensors" for n in ("inputs", "ours", "theirs"))
        save_file(inputs, given)
        which = ["--function", function] if function else []
        run(self.silane, "run", package, "--inputs", given, "--outputs", ours, *which)
        run(sys.executable, self.oracle, "run", package, "--inputs", given, "--out", theirs, *which)
        ours, theirs = load_file(ours), load_file(theirs)
        if not theirs or ours.keys() != theirs.keys():
            raise RuntimeError(f"outputs are {sorted(ours)}, the oracle's are {sorted(theirs)}")
        return max(relative(name, ours[name], theirs[name]) for name in theirs)


def relative(name, x, y):
    x, y = x.astype(np.float64), y.astype(np.float64)
    if x.shape != y.shape:
        raise RuntimeError(f"{name}: {x.shape}, the oracle's is {y.shape}")
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise RuntimeError(f"{name}: not finite")
    return np.abs(x - y).max(initial=0) / max(np.abs(y).max(initial=0), np.finfo(np.float16).tiny)


def load(package):
    """Problems of a package that coremltools alone finds."""
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto.load import load as load_program

    try:
        model = ct.models.MLModel(str(package), skip_model_load=True)
        spec = model.get_spec()
        load_program(
            spec, specification_version=spec.specificationVersion, file_weights_dir=model.weights_dir or ""
        ).validate()
    except Exception as e:
        return [f"coremltools: {type(e).__name__}: {e}"]
    return []


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


def convert(outside, folder, output, threads, *flags):
    command = [outside.silane, "convert", folder, "-o", output, "--no-tokenizer", "--json", *flags]
    try:
        run(*command, env={"RAYON_NUM_THREADS": threads})
    except RuntimeError as e:
        refusals = [line for line in str(e).splitlines() if "model_type" in line and "not supported" in line]
        raise Refused(refusals[0].removeprefix("error: ")) if refusals else e


def row(outside, folder, reference, work):
    """Whether all is well, and the cells."""
    tensors = load_file(reference)
    shape = tensors["input_ids"].shape
    half, again, full = (work / f"{n}.mlpackage" for n in ("half", "again", "full"))
    flags = ["--batch", shape[0], "--sequence-length", shape[1]]
    flags += ["--token-type-ids"] if "token_type_ids" in tensors else []

    def validate(what, *flags):
        command = [outside.silane, "validate", what, "--reference", reference, "--json", *flags]
        return json.loads(run(*command, ok=(0, 1)))

    convert(outside, folder, half, "1", *flags)
    convert(outside, folder, again, "2", *flags)
    convert(outside, folder, full, "2", "--precision", "fp32", *flags)
    same = same_tree(half, again)
    own = worst(validate(folder))
    fp32 = worst(validate(full, "--precision", "fp32"))
    f16w32 = worst(validate(half, "--precision", "fp32"))
    psnr = min(o["psnr"] for o in validate(half)["outputs"])
    problems = outside.problems(half)
    ulps = 0.0
    if outside.oracle:
        names = {"input_ids", "attention_mask", "token_type_ids"} & set(tensors)
        given = {name: tensors[name].astype(np.int32) for name in names}
        given.setdefault("attention_mask", np.ones(shape, np.int32))
        ulps = outside.difference(half, given, work) / HALF_ULP
    good = (own <= PASS["own"] and fp32 <= PASS["fp32"] and psnr >= PASS["psnr"] and ulps < PASS["ulps"]
            and same and not problems)
    return good, [f"{own:.1e}", f"{fp32:.1e}", f"{f16w32:.1e}", f"{psnr:.1f}", str(len(problems)),
                  f"{ulps:.1f}" if outside.oracle else "-", "yes" if same else "NO"]


def table(columns, row, outside, checkpoints, work):
    """Prints the table; gives how many passed and failed."""
    print(f"{'checkpoint':<24} " + " ".join(f"{name:>{width}}" for name, width in columns.items()))
    passed = failed = 0
    for folder, reference in checkpoints:
        place = work / folder.name
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            good, cells = row(outside, folder, reference, place)
            text = " ".join(f"{cell:>{width}}" for cell, width in zip(cells, columns.values()))
            text += " ok" if good else " FAIL"
            passed, failed = passed + good, failed + (not good)
        except Refused as e:
            text = f"refused: {e}"
        except Exception as e:
            text = f"FAIL {e}"
            failed += 1
        print(f"{folder.name:<24} {text}", flush=True)
        shutil.rmtree(place)
    return passed, failed


def main(doc, columns, row):
    p = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--silane", type=Path, required=True)
    p.add_argument("--oracle", type=Path)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("checkpoints", nargs="+")
    a = p.parse_args()
    parts = [item.partition("=") for item in a.checkpoints]
    checkpoints = [(Path(f), Path(r) if r else Path(f) / "reference.safetensors") for f, _, r in parts]
    passed, failed = table(columns, row, Outside(a.silane, a.oracle), checkpoints, a.work)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(__doc__, COLUMNS, row))
