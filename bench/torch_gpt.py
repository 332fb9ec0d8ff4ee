#!/usr/bin/env python3
"""PyTorch's time for the training step that `build/bin/gpt bench` measures: the peer that Tandem is held against.

    ENV/bin/python3 bench/torch_gpt.py [--size small|10m] [--batch N] [--threads 1,2] [--dtypes f32,bf16] [--modes eager,compile]

A step is forward, loss, backward, clipping at norm 1 and update as a user of PyTorch writes them: GPT in nanoGPT's form (no biases, erf
GELU, learned positions, tied head, F.scaled_dot_product_attention), 65 characters, fused AdamW with decay on matrices only, random data that is
already there. small: 4 layers, 4 heads, width 128, context 64, batch 12, no dropout. 10m: 6 layers, 6 heads, width 384, context 256, dropout
0.2, batch 4. bf16 is autocast: f32 parameters, products in bf16. Each configuration runs in a process of its own, so that the number of threads
is set before anything starts them; nothing else should run meanwhile. One JSON object a line: the median of the steps after a warm-up, in ms.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

SIZES = {
    "small": dict(layers=4, heads=4, width=128, context=64, dropout=0.0, batch=12),
    "10m": dict(layers=6, heads=6, width=384, context=256, dropout=0.2, batch=4),
}
VOCABULARY = 65


def build(size):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    width, heads, dropout = size["width"], size["heads"], size["dropout"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
            x = x + F.dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, c)), dropout)
            return x + F.dropout(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)))), dropout)

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, width), nn.Embedding(size["context"], width)
            self.blocks = nn.ModuleList(Block() for _ in range(size["layers"]))
            self.ln_f = nn.LayerNorm(width, bias=False)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)

        def forward(self, ids, targets):
            x = F.dropout(self.wte(ids) + self.wpe.weight, dropout)
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.ln_f(x), self.wte.weight)
            return F.cross_entropy(logits.view(-1, VOCABULARY).float(), targets.view(-1))

    return GPT()


def measure(size_name, threads, dtype, mode, steps, batch):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    size = SIZES[size_name]
    batch = batch or size["batch"]
    model = build(size)
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    try:
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
        fused = True
    except (RuntimeError, ValueError):
        optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
        fused = False
    ids = torch.randint(0, VOCABULARY, (batch, size["context"]))
    targets = torch.randint(0, VOCABULARY, (batch, size["context"]))

    def loss_of(ids, targets):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            return model(ids, targets)

    if mode == "compile":
        loss_of = torch.compile(loss_of)

    def step():
        loss = loss_of(ids, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(max(5, steps // 10)):
        step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    median = statistics.median(times)
    return {
        "peer": "torch", "version": torch.__version__, "model": "gpt", "size": size_name, "mode": mode, "dtype": dtype,
        "threads": threads, "batch": batch, "params": sum(p.numel() for p in parameters), "fused_adamw": fused,
        "step_ms": round(median, 4), "fastest_ms": round(min(times), 4), "items_per_s": round(1e3 * batch / median, 1),
        "final_loss": step().item(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--batch", type=int, default=0, help="sequences; 0: that of --size")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--modes", default="eager,compile")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--one", action="store_true", help="measure in this process, one value of each option")
    args = parser.parse_args()
    if args.one:
        result = measure(args.size, int(args.threads), args.dtypes, args.modes, args.steps, args.batch)
        print(json.dumps(result), flush=True)
        return 0
    failed = 0
    for threads in args.threads.split(","):
        environment = dict(os.environ, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
        for dtype in args.dtypes.split(","):
            for mode in args.modes.split(","):
                command = [sys.executable, __file__, "--one", "--size", args.size, "--batch", str(args.batch), "--threads", threads,
                           "--dtypes", dtype, "--modes", mode, "--steps", str(args.steps)]
                failed |= subprocess.run(command, env=environment).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
