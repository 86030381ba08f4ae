#!/usr/bin/env python3
"""Block-sparse prefill with a fixed budget against the published rule, on a trained model's own queries and keys.

    published.py CHECKPOINT TEXT --prototype DIR [--tokens 8192] [--layers 4,10,16,22,28] [--budgets 8,12,16,24,32,48]

A plain numpy forward pass of a Llama gives queries, keys and values of some layers over the text. On the last 1,024
positions the table sets the output of the fixed budget that silane's graphs compute (one set of blocks per 256 positions
and layer, or per kv head) and of `flashprefill_v2` (adaptive, one set per 32 positions and kv head) against dense
attention. For each budget the published threshold alpha is the one that keeps as many keys. The prototype is the numpy
oracle whose golden vectors the graphs meet.
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


class Published:
    """The published rule on the last positions, as dense as it is asked to be."""

    tile, block, forced_sinks, window = 32, 128, 256, 384

    def __init__(self, q, k, v, scale, start, rule, config):
        self.args, self.start, self.rule, self.config = (q, k, v, scale), start, rule, config
        group, tokens = len(q) // len(k), k.shape[1]
        means = k.reshape(len(k), -1, self.block, k.shape[2]).mean(2)
        begin = np.arange(tokens // self.block) * self.block
        self.shares, self.forced, self.keys = [], [], []
        for lo in range(start, tokens, self.tile):
            hi, rows = lo + self.tile, np.arange(lo, lo + self.tile)
            full = begin + self.block <= hi
            self.forced.append((begin < self.forced_sinks) | (begin + self.block > lo - self.window))
            self.keys.append(np.clip(rows[:, None] + 1 - begin[None], 0, self.block).sum(0))
            for h in range(len(k)):
                z = q[h * group : (h + 1) * group, lo:hi] @ means[h].T * scale
                z = np.where((begin[None] <= rows[:, None])[None] & full[None, None], z, -np.inf)
                e = np.exp(z - z.max()).sum((0, 1))
                self.shares.append(np.where(full, e / e.max(), 0.0))

    def density(self, alpha):
        """Keys attended to exactly, as a share of all that are seen."""
        heads = len(self.shares) // len(self.forced)
        kept = sum(self.keys[i // heads][(s >= alpha) | self.forced[i // heads]].sum() for i, s in enumerate(self.shares))
        return kept / (heads * sum(k.sum() for k in self.keys))

    def alpha(self, density):
        """The threshold at which the rule keeps so much."""
        low, high = 1e-12, 1.0
        for _ in range(60):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.density(middle) > density else (low, middle)
        return low

    def output(self, alpha, correction):
        q, k, v, scale = self.args
        # 32 positions a tile, whatever the group.
        rows = self.tile * (len(q) // len(k))
        config = self.config(alpha=alpha, correction=correction, tail_tiles=0, packed_rows=rows)
        return self.rule(q, k, v, scale, config, tail=False, from_pos=self.start)[0][:, self.start :]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("checkpoint", type=Path)
    p.add_argument("text", type=Path)
    p.add_argument("--prototype", type=Path, required=True)
    p.add_argument("--tokens", type=int, default=8192)
    p.add_argument("--layers", default="4,10,16,22,28")
    p.add_argument("--budgets", default="8,12,16,24,32,48")
    a = p.parse_args()
    sys.path.insert(0, str(a.prototype))
    from dense import dense_attention
    from numerics import rel_l2
    from sparse import SparseConfig, StaticConfig, flashprefill_v2, prefill_static
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(a.checkpoint / "tokenizer.json")).encode(a.text.read_text()).ids[: a.tokens]
    layers, budgets = ([int(n) for n in of.split(",")] for of in (a.layers, a.budgets))
    found, d = forward(a.checkpoint, ids, layers)
    start, scale = a.tokens - 1024, d**-0.5
    chunks = list(range(start, a.tokens, 256))
    print("errors of the attention's output, and the same without means; fixed budgets choose per layer or per kv head\n")
    print(f"{'layer':>5} {'budget':>6} {'density':>8} {'alpha':>8} {'published':>18} {'per layer':>18} {'per head':>18} {'ratio':>6}")
    sums = {budget: np.zeros(3) for budget in budgets}
    for layer, (q, k, v) in found.items():
        exact = dense_attention(q[:, start:], k, v, start, scale)
        published = Published(q, k, v, scale, start, flashprefill_v2, SparseConfig)
        for budget in budgets:
            new = 256 * 257 / 2
            density = sum(budget * 128 * 256 + new for _ in chunks) / sum(c * 256 + new for c in chunks)
            alpha = published.alpha(density)
            both = (True, False)
            errors = [[rel_l2(published.output(alpha, c), exact) for c in both]]
            for share in (len(k), 1):
                row = []
                for correction in both:
                    config = StaticConfig(budget=budget, scoring="tile", share=share, correction=correction)
                    done = prefill_static(q, k, v, 256, scale, config, chunks=chunks)
                    row.append(rel_l2(np.concatenate([done[c][0] for c in chunks], 1), exact))
                errors.append(row)
            text = " ".join(f"{e[0]:>8.4f} ({e[1]:>7.4f})" for e in errors)
            ratio = min(errors[1][0], errors[2][0]) / errors[0][0]
            sums[budget] += [e[0] / len(found) for e in errors]
            print(f"{layer:>5} {budget:>6} {density:>8.3f} {alpha:>8.1e} {text} {ratio:>6.2f}", flush=True)
            if abs(published.density(alpha) - density) > 0.02:
                print(f"{'':>12} the published rule keeps {published.density(alpha):.3f}")
    for budget, (published, per_layer, per_head) in sums.items():
        print(f" mean {budget:>6} {'':>17} {published:>8.4f} {'':>9} {per_layer:>8.4f} {'':>9} {per_head:>8.4f}")


if __name__ == "__main__":
    main()
