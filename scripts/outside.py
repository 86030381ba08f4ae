#!/usr/bin/env python3
"""What tools that are not silane say of it: the checkpoints and packages of fixtures/, tool by tool.

    outside.py [SILANE]

Checkpoints are converted and proven as `encoders.py` and `decoders.py` do, some in the forms of `prefill.py` too.
Packages of other tools are loaded by coremltools, inspected by silane, and where weights and ops allow it run by silane
and by the oracle on the same random inputs, each function by itself; so are three checkpoints that are quantized by what a
text taught. Weights are quantized in some schemes as `quant.py` does in all. The last line says how many passed and
failed.

The oracle is looked for beside the repository, at `shared/oracle/milrun.py`.
"""

import json
import sys
import tempfile
from pathlib import Path

import decoders
import encoders
import numpy as np
import prefill
import quant
from encoders import HALF_ULP, PASS, Outside, run, table
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
# In programs without fp16 values, executors differ by the order of their sums only.
FP32_DIFFERENCE = 1e-4


def main():
    silane = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "target" / "debug" / "silane"
    outside = Outside(silane.resolve(), ROOT.parent / "shared" / "oracle" / "milrun.py")
    if outside.oracle is None:
        print("there is no shared/oracle/milrun.py beside the repository: packages are loaded, but not run")
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        passed = failed = 0
        folders = sorted(p.parent for p in (ROOT / "fixtures" / "models").rglob("reference.safetensors"))
        for kind in (encoders, decoders):
            checkpoints = [(f, f / "reference.safetensors") for f in folders if kind_of(f) is kind]
            if checkpoints:
                right, wrong = table(kind.COLUMNS, kind.row, outside, checkpoints, work)
                passed, failed = passed + right, failed + wrong
                print()
        tiny = ROOT / "fixtures" / "models" / "tiny"
        # The ways to update the cache take turns.
        cases = prefill.cases([tiny / "gemma2"])[::3] + prefill.cases([tiny / "qwen2-window"])[1::3]
        right, wrong = table(prefill.COLUMNS, prefill.row, outside, cases, work)
        passed, failed = passed + right, failed + wrong
        print()
        packages = sorted((ROOT / "fixtures" / "packages").glob("*.mlpackage"))
        checks = [(f"{p.name:<40}", lambda p=p: examine(outside, p, work)) for p in packages]
        for name, how in quant.TAUGHT.items():
            for folder in (tiny / "llama", tiny / "smollm3", tiny / "gemma3_text"):
                checks.append((f"{folder.name:<16} {name:<23}", lambda f=folder, how=how: taught(outside, f, how, work)))
        for name, check in checks:
            try:
                said = check()
                passed += 1
            except Exception as e:
                said = f"FAIL {e}"
                failed += 1
            print(f"{name} {said}", flush=True)
        print()
        right, wrong, _ = quant.made(quant.Here(outside.silane, outside.oracle), work, quick=True)
        passed, failed = passed + right, failed + wrong
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


def kind_of(folder):
    """Whether the stored outputs are generated text."""
    with safe_open(folder / "reference.safetensors", "np") as reference:
        return decoders if "greedy.token_ids" in reference.keys() else encoders


def taught(outside, folder, how, work):
    """A checkpoint that is converted so, with what a text taught."""
    package = work / "taught.mlpackage"
    quant.convert(outside, folder, package, *how, "--context-length", "64", "--prefill-chunk", "8")
    return examine(outside, package, work)


def examine(outside, package, work):
    run(outside.silane, "inspect", package)
    if not all_files_there(package):
        return "inspected; not loaded: its weights were left out"
    # Other tools leave names out, which loads; what does not load is the first finding.
    if refusals := [p for p in outside.problems(package) if p.startswith("coremltools")]:
        raise RuntimeError(refusals[0])
    if outside.oracle is None:
        return "inspected, loads"
    differences = []
    for name, inputs, half in functions(package):
        try:
            difference = outside.difference(package, inputs, work, name)
        except RuntimeError as e:
            if "op not implemented by the oracle" not in str(e):
                raise
            return f"inspected, loads; not run: {str(e).splitlines()[-1]}"
        limit = PASS["ulps"] * HALF_ULP if half else FP32_DIFFERENCE
        if difference > limit:
            raise RuntimeError(f"{name}: {difference:.1e} from the oracle's outputs, {limit:.1e} is allowed")
        differences.append(f"{name} {difference:.1e}")
    return "inspected, loads; from the oracle's outputs: " + ", ".join(differences)


def all_files_there(package):
    items = json.loads((package / "Manifest.json").read_text())["itemInfoEntries"].values()
    return all((package / "Data" / item["path"]).exists() for item in items)


def functions(package):
    """Name, random inputs, and whether there are fp16 values, of each function."""
    from coremltools.proto import MIL_pb2, Model_pb2

    dtypes = {MIL_pb2.FLOAT16: np.float16, MIL_pb2.FLOAT32: np.float32, MIL_pb2.INT32: np.int32}
    manifest = json.loads((package / "Manifest.json").read_text())
    root = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
    spec = Model_pb2.Model.FromString((package / "Data" / root).read_bytes())
    described = [*spec.description.input, *(i for f in spec.description.functions for i in f.input)]
    defaults = {i.name: list(i.type.multiArrayType.shape) for i in described}
    for name, function in sorted(spec.mlProgram.functions.items()):
        rng = np.random.default_rng(0)
        inputs = {}
        for value in function.inputs:
            if value.type.WhichOneof("type") != "tensorType":
                continue
            tensor = value.type.tensorType
            fixed = all(d.WhichOneof("dimension") == "constant" for d in tensor.dimensions)
            shape = [d.constant.size for d in tensor.dimensions] if fixed else defaults[value.name]
            # Integers are ids, positions and counts: 1 is in every range.
            random = rng.standard_normal(shape) if dtypes[tensor.dataType] != np.int32 else np.ones(shape)
            inputs[value.name] = random.astype(dtypes[tensor.dataType])
        body = function.block_specializations[function.opset]
        outputs = (o.type.tensorType.dataType for op in body.operations for o in op.outputs)
        yield name, inputs, MIL_pb2.FLOAT16 in outputs


if __name__ == "__main__":
    sys.exit(main())
