#!/usr/bin/env python3
"""Quantizes packages in every scheme and proves the result with tools that are not silane.

    quant.py --silane target/debug/silane [--oracle milrun.py] --work DIR [--quick] [PACKAGE | FOLDER | CHECKPOINT ...]

A program that coremltools makes, with a weight of a convolution, a linear layer, a matmul and a gather, for four
targets, is quantized in every scheme. Columns:

    bits     per weight, of what was compressed
    SQNR     of the weights in dB, as silane reports it
    ours     the same, measured on what coremltools makes of the written package
    equal    weights that coremltools expands to exactly what silane does, of all
    oracle   largest difference between `silane run` and the oracle's run, in units of the last place
    loads    whether coremltools loads it

Packages, and folders of them, that are given are quantized as int8, lut4, lut6 and int4:b32; further columns are the
bytes of the weights before and after and the PSNR of outputs on random inputs. Checkpoints are converted with
`--quantize` and `--budget` and validated. What silane refuses is shown with its reason and counts as neither passed nor
failed.

Needs a Python with coremltools 9.0, numpy 1.26.4 and safetensors.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from encoders import HALF_ULP, Outside, load, relative, run
from safetensors.numpy import load_file, save_file

OLD = ["int8", "uint8", "int8:t", "uint8:o", "lut1", "lut2", "lut4", "lut6", "lut8", "lut4:exact", "sparse50", "2:4"]
NEW = OLD + [
    "int8:o", "int8:b16", "int4", "uint4", "int4:t", "int4:b16", "uint4:b16", "int4:b32:o", "uint8:b8", "lut3",
    "lut4:g16", "lut4:g8", "lut6:g16", "lut3:g8", "lut4:g16i", "lut8:g16", "lut2:v2", "lut4:v4", "lut4:g16:v2",
    "lut4:i8", "lut4:g16:i8", "lut6:g8:i8", "lut2:v2:i8", "sparse50+int8", "sparse50+lut4", "sparse75+lut4:g16",
    "2:4+int8", "2:4+int4:b16", "sparse50+uint4", "2:4+lut4:i8",
]
QUICK = ["int8", "uint8", "int4:b16", "lut3:g8", "lut4:g16:v2", "lut4:g16:i8", "sparse50", "2:4+int4:b16", "sparse50+lut4"]
THIRD_PARTY = ["int8", "lut4", "lut6", "int4:b32"]
TAUGHT = {
    "w8a8": ["--quantize", "w8a8", "--calibrate-tokens", "1024"],
    "w8a8, smoothed": ["--quantize", "w8a8", "--calibrate-tokens", "1024", "--smooth", "0.5"],
    "lut4:g16, importance": ["--quantize", "lut4:g16", "--calibrate-tokens", "1024", "--importance"],
    "int4, GPTQ, smoothed": ["--quantize", "int4", "--calibrate-tokens", "1024", "--gptq", "--smooth", "0.5"],
    "int4, GPTQ, rotated": ["--quantize", "int4", "--calibrate-tokens", "1024", "--gptq", "--rotate"],
    "5 bits, GPTQ": ["--budget", "5bpw", "--calibrate-tokens", "1024", "--gptq"],
}
WAYS = {
    scheme: ["--quantize", scheme, "--allow-slow"]
    for scheme in ["int8", "lut8:g16", "lut6:g16", "lut4:g8", "lut4:g16", "lut4", "int4:b16", "2:4", "sparse50+lut4"]
} | TAUGHT


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--silane", type=Path, required=True)
    p.add_argument("--oracle", type=Path)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--quick", action="store_true", help="some schemes, two targets")
    p.add_argument("models", nargs="*", type=Path)
    args = p.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    outside = Here(args.silane.resolve(), args.oracle)
    passed, failed, refused = made(outside, args.work, args.quick)
    for model in args.models:
        for one in packages(model):
            counts = checkpoint(outside, one, args.work) if (one / "config.json").exists() else third_party(outside, one, args.work)
            passed, failed, refused = passed + counts[0], failed + counts[1], refused + counts[2]
    print(f"{passed} passed, {failed} failed, {refused} refused")
    return 1 if failed or not passed else 0


class Here(Outside):
    """The same tools in this process: there are hundreds of packages."""

    def __init__(self, silane, oracle):
        super().__init__(silane, oracle)
        self.module = None
        if self.oracle is not None:
            spec = importlib.util.spec_from_file_location("oracle", self.oracle)
            self.module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(self.module)

    def problems(self, package):
        with tempfile.TemporaryDirectory() as directory:
            # coremltools rewrites the manifest of a package that it opens.
            copy = shutil.copytree(package, Path(directory) / package.name)
            found = load(copy)
            if self.module is not None and not found:
                found = self.module.declared_types(self.module.Package(copy))
            return found

    def difference(self, package, inputs, work, function=None):
        given, ours = (work / f"{n}.safetensors" for n in ("inputs", "ours"))
        save_file(inputs, given)
        run(self.silane, "run", package, "--inputs", given, "--outputs", ours)
        theirs = self.module.Package(package).predict(inputs)
        ours = load_file(ours)
        return max(relative(name, ours[name], np.asarray(theirs[name])) for name in theirs)


def packages(path):
    if path.suffix == ".mlpackage" or (path / "config.json").exists():
        return [path]
    return sorted(path.rglob("*.mlpackage"))


def made(outside, work, quick):
    """Every scheme on programs of coremltools' own making."""
    passed = failed = refused = 0
    targets = {"iOS16": OLD, "iOS18": QUICK if quick else NEW}
    if not quick:
        targets |= {"iOS26": NEW, "iOS17": OLD, "iOS18 fp32": NEW}
    print(f"{'target':<11} {'scheme':<18} {'bits':>5} {'SQNR':>6} {'ours':>6} {'equal':>6} {'oracle':>6} loads")
    for target, schemes in targets.items():
        package = work / f"made {target}.mlpackage"
        weights = build(target, package)
        for scheme in schemes if not quick or target != "iOS16" else ["int8", "lut6", "sparse50"]:
            out = work / "quantized.mlpackage"
            try:
                said = quantize(outside, package, out, scheme, "--smallest", "100")
                row = judge(outside, out, said, work, weights, "fp32" in target)
                passed += 1
            except Exception as e:
                row, failed = f"FAIL {e}", failed + 1
            print(f"{target:<11} {scheme:<18} {row}", flush=True)
    for target, scheme in [("iOS16", "lut4:g16"), ("iOS16", "int4"), ("iOS17", "int4:b32"), ("iOS16", "sparse50+lut4")]:
        package = work / f"refused {target}.mlpackage"
        build(target, package)
        try:
            quantize(outside, package, work / "none.mlpackage", scheme)
            print(f"{target:<11} {scheme:<18} FAIL: it is not refused")
            failed += 1
        except Refused as e:
            print(f"{target:<11} {scheme:<18} refused: {e}")
            refused += 1
    return passed, failed, refused


class Refused(Exception):
    pass


def quantize(outside, package, out, scheme, *more):
    command = [outside.silane, "quantize", package, "-o", out, "--scheme", scheme, "--allow-slow", "--force", "--json", *more]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr.strip().splitlines()[0].removeprefix("error: "))
    return json.loads(done.stdout)


def judge(outside, package, said, work, weights, fp32):
    problems = outside.problems(package)
    if problems:
        raise RuntimeError(problems[0])
    expanded = expand(package)
    equal, signal, error = 0, 0.0, 0.0
    for tensor in said["tensors"]:
        theirs = expanded[tensor["name"]]
        dump = work / "weight.npy"
        run(outside.silane, "inspect", package, "--dump", tensor["name"], dump)
        ours = np.load(dump)
        exact = np.array_equal(ours, theirs.astype(np.float32))
        # numpy multiplies in fp16 what a device, like silane, rounds once; products of fp32 may differ in the last bit.
        near = np.abs(ours - theirs).max() <= 2 * HALF_ULP * np.abs(ours).max()
        if not near:
            raise RuntimeError(f"{tensor['name']}: coremltools expands it to something else")
        equal += exact
        if weights:
            source = next(w for w in weights if w.shape == ours.shape)
            signal += float((source.astype(np.float64) ** 2).sum())
            error += float(((source.astype(np.float64) - ours) ** 2).sum())
    total = said["compressed"]
    measured = 10 * np.log10(signal / error) if error else 999.0
    # Products of fp32 programs are not rounded to fp16, as they are where silane measures.
    if weights and abs(measured - total["sqnr_db"]) > (0.1 if fp32 else 0.011):
        raise RuntimeError(f"SQNR {measured:.2f} dB measured, {total['sqnr_db']} dB reported")
    difference = "-"
    if outside.oracle:
        difference = oracle_difference(outside, package, work)
    return (
        f"{total['bits_per_weight']:5.2f} {min(total['sqnr_db'], 999):6.1f} {min(measured, 999):6.1f} "
        f"{equal:>3}/{len(said['tensors']):<2} {difference:>6} yes"
    )


def oracle_difference(outside, package, work):
    try:
        difference = outside.difference(package, random_inputs(package), work) / HALF_ULP
    except outside.module.OracleError as e:
        # Tables of a convolution's weight have rank 6, which Core ML takes and the oracle does not.
        if "rank 6 exceeds 5" in str(e):
            return "rank 6"
        raise
    if difference > 16:
        raise RuntimeError(f"{difference:.1f} units from the oracle's outputs")
    return f"{difference:.2f}"


def expand(package):
    """Every weight that a constexpr op makes, as coremltools expands it."""
    import coremltools as ct
    from coremltools.converters.mil.frontend.milproto.load import load

    with tempfile.TemporaryDirectory() as directory:
        copy = shutil.copytree(package, Path(directory) / "copy.mlpackage")
        model = ct.models.MLModel(str(copy), skip_model_load=True)
        spec = model.get_spec()
        program = load(spec, specification_version=spec.specificationVersion, file_weights_dir=model.weights_dir or "")
        made = {}
        for function in program.functions.values():
            for op in function.operations:
                if op.op_type.startswith("constexpr_"):
                    values = expand_op(op, made)
                    made |= {o.name: v for o, v in zip(op.outputs, values)}
        return made


def expand_op(op, made):
    """coremltools' own arithmetic; arguments that another constexpr made are put in their places first."""
    given = {n: made[v.name] if getattr(v, "name", None) in made else getattr(v, "val", None) for n, v in op.inputs.items()}
    kind = type(op)
    if op.op_type == "constexpr_lut_to_dense" and "indices" in given and given.get("lut") is not None and "shape" not in given:
        return [kind.decompress(given["indices"], given["lut"], given.get("vector_axis"))]
    if op.op_type == "constexpr_sparse_to_dense" and "shape" not in given:
        return [kind.decompress(given["nonzero_data"], given["mask"])]
    if op.op_type == "constexpr_blockwise_shift_scale":
        return [kind.decompress(given["data"], given["scale"], given.get("offset"))]
    if op.op_type == "constexpr_lut_to_sparse":
        return list(kind.decompress(given["indices_mask"], given["indices_nonzero_data"], given["lut"], given.get("vector_axis")))
    value = op.materialized_val_inference()
    return list(value) if isinstance(value, tuple) else [value]


def random_inputs(package):
    from outside import functions

    _, inputs, _ = next(functions(package))
    return inputs


def build(target, path):
    """A package with one weight of each kind; gives the weights."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    fp32 = target.endswith("fp32")
    dtype, mil_type = (np.float32, types.fp32) if fp32 else (np.float16, types.fp16)
    opset = getattr(ct.target, target.split()[0])
    rng = np.random.default_rng(7)
    made = []

    def weight(*shape):
        # Rows of different sizes, as trained ones have; fp32 ones are fp16 numbers too.
        w = 0.1 * rng.standard_normal(shape) * np.exp(0.5 * rng.standard_normal((shape[0],) + (1,) * (len(shape) - 1)))
        made.append(w.astype(np.float16).astype(dtype))
        return made[-1]

    @mb.program(
        input_specs=[mb.TensorSpec((1, 48, 1, 8), dtype=mil_type), mb.TensorSpec((1, 8), dtype=types.int32)],
        opset_version=opset,
    )
    def program(x, ids):
        c = mb.conv(x=x, weight=weight(64, 48, 1, 1), name="conv")
        t = mb.transpose(x=mb.squeeze(x=c, axes=[2]), perm=[0, 2, 1])
        y = mb.linear(x=t, weight=weight(80, 64), name="linear")
        m = mb.matmul(x=y, y=weight(80, 48), name="matmul")
        g = mb.gather(x=weight(96, 48), indices=ids, axis=0, name="embedding")
        return mb.add(x=m, y=g, name="out")

    precision = ct.precision.FLOAT32 if fp32 else ct.precision.FLOAT16
    with contextlib.redirect_stderr(io.StringIO()):
        model = ct.convert(program, minimum_deployment_target=opset, compute_precision=precision, skip_model_load=True)
    shutil.rmtree(path, ignore_errors=True)
    model.save(str(path))
    return made


def third_party(outside, package, work):
    """Packages of other tools, in the schemes that people use most."""
    passed = failed = refused = 0
    for scheme in THIRD_PARTY:
        out = work / "quantized.mlpackage"
        shutil.rmtree(out, ignore_errors=True)
        name = f"{package.parent.name}/{package.stem}"[-44:]
        try:
            said, how = at_any_price(outside, package, out, scheme)
            # What the original already has is not the fault of the quantizer.
            fresh = [p for p in outside.problems(out) if p not in outside.problems(package)]
            if fresh:
                raise RuntimeError(fresh[0])
            before, after = said["weight_bytes"]["before"], said["weight_bytes"]["after"]
            if after >= before and not {"--recompress", "--smallest"} & set(how):
                raise RuntimeError(f"{before} bytes became {after}")
            row = (
                f"{len(said['tensors'])} weights, {before} → {after} bytes, SQNR {said['compressed']['sqnr_db']} dB, "
                f"outputs {outputs(outside, package, out, work)} {' '.join(how)}"
            )
            passed += 1
        except Refused as e:
            row, refused = f"refused: {str(e).replace(str(package), package.name)}", refused + 1
        except Exception as e:
            row, failed = f"FAIL {e}", failed + 1
        print(f"{name:<44} {scheme:<9} {row}", flush=True)
    return passed, failed, refused


def at_any_price(outside, package, out, scheme):
    """As it is; else raised to a system that has the scheme, small weights too, else compressed anew."""
    how = []
    for _ in range(4):
        try:
            return quantize(outside, package, out, scheme, *how), how
        except Refused as e:
            if " needs CoreML" in str(e) and "--minimum-os" not in how:
                how += ["--minimum-os", "ios18" if "needs CoreML8" in str(e) else "ios16"]
            elif "no weight" in str(e) and "--smallest" not in how:
                how += ["--smallest", "16"]
            elif "no weight" in str(e) and "--recompress" not in how:
                how += ["--recompress"]
            else:
                raise
    raise Refused("in every way")


def outputs(outside, before, after, work):
    """PSNR of the first function's outputs on the same random inputs."""
    from outside import functions

    name, inputs, _ = next(functions(before))
    given, a, b = (work / f"{n}.safetensors" for n in ("inputs", "before", "after"))
    save_file(inputs, given)
    try:
        for package, out in ((before, a), (after, b)):
            run(outside.silane, "run", package, "--inputs", given, "--outputs", out, "--function", name)
    except RuntimeError as e:
        return f"not run: {str(e).strip().splitlines()[-1]}"
    a, b = load_file(a), load_file(b)
    found = []
    for key in a:
        x, y = a[key].astype(np.float64), b[key].astype(np.float64)
        finite = np.isfinite(x) & np.isfinite(y)
        if not finite.all():
            return f"{np.isfinite(x).mean():.0%} finite before, {np.isfinite(y).mean():.0%} after, on random inputs"
        rms = np.sqrt(np.mean((x - y) ** 2))
        spread = x.max() - x.min() or np.abs(x).max()
        found.append(999.0 if rms == 0 else 20 * np.log10(max(spread, 1e-12) / rms))
    return f"{min(found):.1f} dB"


def checkpoint(outside, folder, work):
    """A checkpoint, converted in several ways and validated at the error that these allow."""
    passed = failed = 0
    for name, how in WAYS.items():
        out = work / "converted.mlpackage"
        try:
            said = convert(outside, folder, out, *how, "--validate", "--context-length", "64", "--prefill-chunk", "8")
            if problems := outside.problems(out):
                raise RuntimeError(problems[0])
            total = said["quantization"]["compressed"]
            psnr = min(o["psnr"] for o in said["validation"]["outputs"])
            row = f"{total['bits_per_weight']:.2f} bits, SQNR {total['sqnr_db']} dB, outputs {psnr:.1f} dB"
            if not said["validation"]["pass"]:
                raise RuntimeError(f"not valid: {row}")
            passed += 1
        except Refused:  # only language models can be calibrated
            continue
        except Exception as e:
            row, failed = f"FAIL {e}", failed + 1
        print(f"{folder.name:<28} {name:<24} {row}", flush=True)
    return passed, failed, 0


def convert(outside, folder, out, *how):
    """What silane says of a conversion, which may be calibrated on its own README."""
    command = [outside.silane, "convert", folder, "-o", out, "--force", "--no-tokenizer", "--json", *how]
    if "--calibrate-tokens" in how:
        command += ["--calibrate", Path(__file__).resolve().parent.parent / "README.md"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if "has no reference" in done.stderr:
        raise Refused(done.stderr.strip())
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr.strip())
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
