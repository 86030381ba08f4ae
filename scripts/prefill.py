#!/usr/bin/env python3
"""Prefill in tiles and in blocks: what coremltools and the oracle say of the packages.

    prefill.py CHECKPOINT [CHECKPOINT ...] [--silane PATH] [--oracle PATH]

Each checkpoint is converted in every form, way to fetch, and way to update the cache. coremltools loads the package,
no function may hold a `tile`, none with one-hot fetching a `gather` behind its head, and each prefill function is run
by silane and by the oracle at the first position that it takes. The table says what was found; the last line how many
passed and failed.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
from encoders import HALF_ULP, PASS, Outside, run, table

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = "block-sparse:block=8,budget=3,sinks=1,window=2,dense-layers=0"
FORMS = {
    "tiled": "tiled:tile=32,group=1",
    "filled buckets": "tiled:tile=32,filled=yes",
    "blocks, one-hot": BLOCKS,
    "blocks, index": f"{BLOCKS},gather=index,select=head",
    "blocks, alpha": f"{BLOCKS},gather=index,alpha=0.1,scoring=tile",
    "blocks, exact first layer": f"{BLOCKS.replace('dense-layers=0', 'dense-layers=1')},correction=no",
}
COLUMNS = {"form": 26, "update": 6, "problems": 8, "ulps": 6}


def row(outside, folder, case, work):
    form, update = case
    package = work / "prefill.mlpackage"
    buckets = ["--buckets", "32,64"] if "tiled" in FORMS[form] else []
    run(
        outside.silane, "convert", folder, "-o", package, "--force", "--no-tokenizer", "--context-length", "64",
        "--prefill-chunk", "16", "--attention", FORMS[form], "--cache-update", update, *buckets,
    )  # fmt: skip
    problems = outside.problems(package)
    kinds = ops(package)
    for name, function in kinds.items():
        if "tile" in function:
            problems.append(f"{name} holds a tile")
        # Token embedding and rotary rows are looked up at the head.
        if name == "prefill_sparse" and "one-hot" in form and function.count("gather") > function.index("conv"):
            problems.append(f"{name} gathers behind its head")
    ulps = 0.0
    for name, described in contract(package)["functions"].items():
        if not name.startswith("prefill") or outside.oracle is None:
            continue
        first, n = described["min_position"], described["tokens"]
        inputs = {
            "input_ids": (np.arange(n, dtype=np.int32)[None] * 37) % 100,
            "position_ids": np.arange(first, first + n, dtype=np.int32)[None],
        }
        ulps = max(ulps, outside.difference(package, inputs, work, name) / HALF_ULP)
    if problems:
        raise RuntimeError("; ".join(problems))
    return ulps <= PASS["ulps"], [form, update, len(problems), f"{ulps:.1f}"]


def contract(package):
    return json.loads(model(package).description.metadata.userDefined["silane.contract"])


def ops(package):
    """Kinds of each function's ops in order."""
    found = {}
    for name, function in model(package).mlProgram.functions.items():
        body = function.block_specializations[function.opset]
        found[name] = [op.type for op in body.operations]
    return found


def model(package):
    from coremltools.proto import Model_pb2

    manifest = json.loads((package / "Manifest.json").read_text())
    root = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
    return Model_pb2.Model.FromString((package / "Data" / root).read_bytes())


def cases(folders):
    return [(f, (form, update)) for f in folders for form in FORMS for update in ("slice", "mask")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+", type=Path)
    parser.add_argument("--silane", type=Path, default=ROOT / "target" / "debug" / "silane")
    parser.add_argument("--oracle", type=Path, default=ROOT.parent / "shared" / "oracle" / "milrun.py")
    given = parser.parse_args()
    outside = Outside(given.silane.resolve(), given.oracle)
    with tempfile.TemporaryDirectory() as work:
        passed, failed = table(COLUMNS, row, outside, cases(given.checkpoints), Path(work))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
