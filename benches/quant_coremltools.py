"""coremltools' compression of the weight that `cargo bench --bench quant -- --save FILE` wrote.

    quant_coremltools.py FILE ROWS COLUMNS [OUTPUT OF THE BENCH]

Each line is a call of coremltools.optimize.coreml on a program of one convolution, as users make it: time of the
call, and the squared error of the weight that it then holds. With the bench's output, silane's figures over
coremltools' are beside it.
"""

import sys
import time

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.frontend.milproto.load import load as load_program


def palette(nbits, **more):
    return cto.palettize_weights, cto.OpPalettizerConfig(mode="kmeans", nbits=nbits, num_kmeans_workers=1, **more)


def grouped(nbits, size, **more):
    return palette(nbits, granularity="per_grouped_channel", group_size=size, **more)


def linear(mode, dtype, **more):
    return cto.linear_quantize_weights, cto.OpLinearQuantizerConfig(mode=mode, dtype=dtype, **more)


CASES = {
    "int8": linear("linear_symmetric", "int8", granularity="per_channel"),
    "int8:t": linear("linear_symmetric", "int8", granularity="per_tensor"),
    "int8:o": linear("linear", "int8", granularity="per_channel"),
    "uint8": linear("linear", "uint8", granularity="per_channel"),
    "int4": linear("linear_symmetric", "int4", granularity="per_channel"),
    "int4:b32": linear("linear_symmetric", "int4", granularity="per_block", block_size=32),
    "uint4:b32": linear("linear", "uint4", granularity="per_block", block_size=32),
    "lut2:g8": grouped(2, 8),
    "lut3:g8": grouped(3, 8),
    "lut4": palette(4, granularity="per_tensor"),
    "lut4:g8": grouped(4, 8),
    "lut4:g16": grouped(4, 16),
    "lut6": palette(6, granularity="per_tensor"),
    "lut6:g16": grouped(6, 16),
    "lut4:v2": palette(4, granularity="per_tensor", cluster_dim=2),
}


def main():
    rows, columns = int(sys.argv[2]), int(sys.argv[3])
    weight = np.fromfile(sys.argv[1], np.float16).reshape(rows, columns, 1, 1)
    ours = {}
    if len(sys.argv) > 4:
        lines = (line.split() for line in open(sys.argv[4]))
        ours = {f[0]: (float(f[1]), float(f[2])) for f in lines if len(f) == 5 and f[0] in CASES}
    fp16 = ct.converters.mil.mil.types.fp16

    @mb.program(
        input_specs=[mb.TensorSpec(shape=(1, columns, 1, 1), dtype=fp16)], opset_version=ct.target.iOS18
    )
    def program(x):
        return mb.conv(x=x, weight=weight, pad_type="valid", name="y")

    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS18,
        compute_units=ct.ComputeUnit.CPU_ONLY,
        skip_model_load=True,
    )
    print(f"coremltools {ct.__version__}")
    print(f"{'scheme':<22} {'M weights/s':>14} {'squared error':>16} {'faster by':>10} {'error of theirs':>16}")
    for name, (compress, config) in CASES.items():
        if ours and name not in ours:
            continue
        start = time.perf_counter()
        compressed = compress(model, cto.OptimizationConfig(global_config=config))
        speed = weight.size / (time.perf_counter() - start) / 1e6
        error = np.sum((dense(compressed, weight) - weight.astype(np.float64)) ** 2)
        beside = f"{ours[name][0] / speed:>9.1f}x {ours[name][1] / error:>16.6f}" if name in ours else ""
        print(f"{name:<22} {speed:>14.3f} {error:>16.6f} {beside}", flush=True)


def dense(model, weight):
    """The weight that the one compressed constant of a model stands for."""
    spec = model.get_spec()
    program = load_program(spec, spec.specificationVersion, model.weights_dir)
    (op,) = (op for op in program.functions["main"].operations if op.op_type.startswith("constexpr_"))
    return op.materialized_val_inference().astype(np.float64).reshape(weight.shape)


if __name__ == "__main__":
    main()
