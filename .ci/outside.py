"""What tools that are not silane say of its packages.

Converts every checkpoint of fixtures/models, loads the package with coremltools, whose type inference refuses
a malformed op, and runs it with both silane and an independent executor on the checkpoint's reference inputs.
The executor lives outside of the repository; without it packages are only loaded.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("COREMLTOOLS_DISABLE_WARNINGS", "1")

import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
SILANE = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "target" / "debug" / "silane"
ORACLE = ROOT.parent / "shared" / "oracle" / "milrun.py"
# Two executors that round each result to fp16 differ by the order of their sums.
TOLERANCE = 2e-2
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "pixel_values")


def main():
    checkpoints = sorted(p.parent for p in (ROOT / "fixtures" / "models").glob("**/config.json"))
    if not checkpoints:
        print("no checkpoints in fixtures/models")
        return 1
    if not ORACLE.exists():
        print(f"{ORACLE} does not exist: packages are loaded with coremltools, and not run")
    failures = []
    for n, checkpoint in enumerate(checkpoints, 1):
        name = str(checkpoint.relative_to(ROOT / "fixtures" / "models"))
        start = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as directory:
                said = examine(checkpoint, Path(directory))
        except Failure as e:
            failures.append(name)
            said = f"FAILED: {e}"
        print(f"[{n}/{len(checkpoints)}] {name}: {said} ({time.monotonic() - start:.1f}s)", flush=True)
    print(f"{len(checkpoints) - len(failures)} of {len(checkpoints)} packages are as they should be")
    if failures:
        print("failed: " + ", ".join(failures))
    return 1 if failures else 0


class Failure(Exception):
    pass


def examine(checkpoint, directory):
    reference = references(checkpoint)
    package = directory / "model.mlpackage"
    convert(checkpoint, package, reference)
    if not ORACLE.exists():
        load(package)
        return "loads"
    # coremltools rewrites the manifest of a package that it opens.
    copy = directory / "copy.mlpackage"
    run("cp", "-r", package, copy)
    run(sys.executable, ORACLE, "check", copy)
    inputs = feeds(package, reference)
    if inputs is None:
        return "loads; no reference inputs fit"
    return compare(package, inputs, directory)


def references(checkpoint):
    path = checkpoint / "reference.safetensors"
    return load_file(path) if path.exists() else {}


def convert(checkpoint, package, reference):
    command = [SILANE, "convert", checkpoint, "-o", package]
    ids = reference.get("input_ids")
    if ids is not None and ids.ndim == 2 and not generates(reference):
        command += ["--batch", str(ids.shape[0]), "--sequence-length", str(ids.shape[1])]
    run(*command)


def generates(reference):
    return any(name.startswith("greedy.") for name in reference)


def load(package):
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto.load import load as milproto_load

    model = ct.models.MLModel(str(package), skip_model_load=True)
    spec = model.get_spec()
    try:
        program = milproto_load(
            spec, specification_version=spec.specificationVersion, file_weights_dir=model.weights_dir
        )
        program._check_early_error_out_for_invalid_program()
        program.validate()
    except Exception as e:
        raise Failure(f"coremltools: {e}") from e


def feeds(package, reference):
    """The reference inputs under the package's own names, shapes and types; None where they do not fit."""
    found = {}
    for name, shape, dtype in interface(package):
        if name not in INPUTS or name not in reference or reference[name].shape != shape:
            return None
        found[name] = reference[name].astype(dtype)
    return found


def interface(package):
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    manifest = json.loads((package / "Manifest.json").read_text())
    root = manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"]
    spec.ParseFromString((package / "Data" / root).read_bytes())
    types = {65552: np.float16, 65568: np.float32, 131104: np.int32}
    for feature in spec.description.input:
        array = feature.type.multiArrayType
        yield feature.name, tuple(array.shape), types.get(array.dataType, np.float32)


def compare(package, inputs, directory):
    given, ours, theirs = (directory / f"{n}.safetensors" for n in ("inputs", "ours", "theirs"))
    save_file({name: np.ascontiguousarray(v) for name, v in inputs.items()}, given)
    run(SILANE, "run", package, "--inputs", given, "--outputs", ours, "--precision", "fp16")
    run(sys.executable, ORACLE, "run", package, "--inputs", given, "--out", theirs, "--precision", "fp16")
    ours, theirs = load_file(ours), load_file(theirs)
    if not theirs or ours.keys() != theirs.keys():
        raise Failure(f"outputs are {sorted(ours)}, the executor's are {sorted(theirs)}")
    worst = 0.0
    for name in sorted(theirs):
        a, b = (np.asarray(v, np.float64) for v in (ours[name], theirs[name]))
        if a.shape != b.shape:
            raise Failure(f"{name} is {a.shape}, the executor's is {b.shape}")
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise Failure(f"{name} holds something infinite or no number")
        worst = max(worst, float(np.abs(a - b).max(initial=0) / max(1.0, np.abs(b).max(initial=0))))
    if worst > TOLERANCE:
        raise Failure(f"off by {worst:.2e}, {TOLERANCE} is allowed")
    return f"loads, agrees within {worst:.1e}"


def run(*command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).strip().splitlines() if line.strip()]
        said = "\n    ".join(lines[-8:])
        raise Failure(f"{Path(str(command[0])).name} {command[1]} gave {done.returncode}\n    {said}")


if __name__ == "__main__":
    sys.exit(main())
