#!/usr/bin/env python3
"""Block-sparse prefill with a fixed budget against the published rule, on a trained model's own queries and keys.

    published.py CHECKPOINT TEXT --prototype DIR [--tokens 4096] [--layers 4,10,16,22,28]

A plain numpy forward pass of a Llama gives queries, keys and values of some layers over the text. On the last 1,024
positions the table sets the output of `flashprefill_v2` (adaptive, one set of blocks per 32 positions and kv head)
and of the fixed budget that silane's graphs compute (one set per 256 positions and layer, or per kv head) against dense
attention. The prototype is the numpy oracle whose golden vectors the graphs meet.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np


def tensors(path):
    """A function that gives tensors by name; numpy's safetensors reads no bfloat16."""
    data = np.memmap(path, np.uint8, "r")
    length = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + length].tobytes())

    def get(name):
        info = header[name]
        start, end = (8 + length + o for o in info["data_offsets"])
        raw = np.array(data[start:end])
        if info["dtype"] == "BF16":
            raw = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            raw = raw.view({"F32": np.float32, "F16": np.float16}[info["dtype"]]).astype(np.float32)
        return raw.reshape(info["shape"])

    return get


def forward(folder, ids, wanted):
    """q, k, v of the wanted layers, rotated, q without the scale."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    d = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    eps, n = config["rms_norm_eps"], len(ids)
    get = tensors(folder / "model.safetensors")
    norm = lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w  # noqa: E731
    angle = np.arange(n)[:, None] / theta ** (np.arange(0, d, 2)[None] / d)
    cos, sin = (np.concatenate([f(angle)] * 2, 1).astype(np.float32) for f in (np.cos, np.sin))
    turn = lambda x: x * cos + np.concatenate([-x[..., d // 2 :], x[..., : d // 2]], -1) * sin  # noqa: E731
    x, found = get("model.embed_tokens.weight")[ids], {}
    for layer in range(max(wanted) + 1):
        at = f"model.layers.{layer}."
        h = norm(x, get(at + "input_layernorm.weight"))
        q, k, v = (
            (h @ get(f"{at}self_attn.{p}_proj.weight").T).reshape(n, -1, d).transpose(1, 0, 2) for p in "qkv"
        )
        q, k = turn(q), turn(k)
        if layer in wanted:
            found[layer] = [np.ascontiguousarray(a, np.float32) for a in (q, k, v)]
        out = np.empty((n, heads * d), np.float32)
        for head in range(heads):
            kh, vh = k[head * kv // heads], v[head * kv // heads]
            for a in range(0, n, 512):
                s = q[head, a : a + 512] @ kh[: a + 512].T * d**-0.5
                s[np.arange(a + 512)[None] > np.arange(a, a + 512)[:, None]] = -np.inf
                p = np.exp(s - s.max(-1, keepdims=True))
                out[a : a + 512, head * d : (head + 1) * d] = p @ vh[: a + 512] / p.sum(-1, keepdims=True)
        x = x + out @ get(at + "self_attn.o_proj.weight").T
        h = norm(x, get(at + "post_attention_layernorm.weight"))
        gate = h @ get(at + "mlp.gate_proj.weight").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ get(at + "mlp.up_proj.weight").T)) @ get(at + "mlp.down_proj.weight").T
    return found, d


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("checkpoint", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("--prototype", type=Path, required=True)
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--layers", default="4,10,16,22,28")
    a = p.parse_args()
    sys.path.insert(0, str(a.prototype))
    from dense import dense_attention
    from numerics import rel_l2
    from sparse import SparseConfig, StaticConfig, flashprefill_v2, prefill_static
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(a.checkpoint / "tokenizer.json")).encode(a.text.read_text()).ids[: a.tokens]
    layers = [int(n) for n in a.layers.split(",")]
    found, d = forward(a.checkpoint, ids, layers)
    start, scale = a.tokens - 1024, d**-0.5
    chunks = list(range(start, a.tokens, 256))
    print(f"{'layer':>5} {'rule':<26} {'density':>8} {'error':>8} {'without means':>14}")
    for layer, (q, k, v) in found.items():
        exact = dense_attention(q[:, start:], k, v, start, scale)
        errors = {}
        for correction in (True, False):
            # 32 positions a tile, whatever the group.
            config = SparseConfig(correction=correction, tail_tiles=0, packed_rows=32 * (len(q) // len(k)))
            out, density, _ = flashprefill_v2(q, k, v, scale, config, tail=False, from_pos=start)
            errors[correction] = rel_l2(out[:, start:], exact)
        print(f"{layer:>5} {'published, alpha 0.1':<26} {density:>8.3f} {errors[True]:>8.4f} {errors[False]:>14.4f}", flush=True)
        new = 256 * 257 / 2
        share_of = lambda b: sum(b * 128 * 256 + new for _ in chunks) / sum(c * 256 + new for c in chunks)  # noqa: E731
        # The largest budget that keeps no more keys than the published rule, and common ones.
        equal = max((b for b in range(6, 24) if share_of(b) <= density), default=6)
        for share in (k.shape[0], 1):
            for budget in sorted({equal, 8, 16}):
                for correction in (True, False):
                    config = StaticConfig(budget=budget, scoring="row", share=share, correction=correction)
                    done = prefill_static(q, k, v, 256, scale, config, chunks=chunks)
                    out = np.concatenate([done[c][0] for c in chunks], 1)
                    errors[correction] = rel_l2(out, exact)
                name = f"budget {budget}, per {'layer' if share > 1 else 'kv head'}"
                print(f"{layer:>5} {name:<26} {share_of(budget):>8.3f} {errors[True]:>8.4f} {errors[False]:>14.4f}", flush=True)


if __name__ == "__main__":
    main()
