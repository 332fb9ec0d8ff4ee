#!/usr/bin/env python3
"""PyTorch's time for the training step that `build/bin/mlp bench` measures: the peer that Tandem is held against.

    python3 -m venv ENV && ENV/bin/pip install torch numpy          (a current one; Debian's is of 2022)
    ENV/bin/python3 bench/torch_mlp.py [--threads 1,2] [--dtypes f32,bf16] [--modes eager,compile] [--steps 300]

A step is forward, loss, backward and update as a user of PyTorch writes them: 784-1024-1024-10 with ReLU, batch 128,
cross-entropy, AdamW (the fused one where this PyTorch has it for the CPU), random data that is already there. bf16 is
autocast: f32 parameters, products in bf16. Each configuration runs in a process of its own, so that the number of
threads is set before anything starts them; nothing else should run meanwhile. One JSON object a line: the median of
the steps after a warm-up, in ms.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def measure(threads, dtype, mode, steps, batch):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    options = dict(lr=1e-3, weight_decay=0.01)
    try:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **options)
        fused = True
    except (RuntimeError, ValueError):
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        fused = False
    x = torch.rand(batch, 784)
    labels = torch.randint(0, 10, (batch,))

    def loss_of(x, labels):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(x)
        return F.cross_entropy(logits.float(), labels)

    if mode == "compile":
        loss_of = torch.compile(loss_of)

    def step():
        loss = loss_of(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in range(max(20, steps // 10)):
        step()
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - begin))
    median = statistics.median(times)
    return {
        "peer": "torch", "version": torch.__version__, "model": "mlp", "mode": mode, "dtype": dtype,
        "threads": threads, "batch": batch, "fused_adamw": fused, "step_ms": round(median, 4),
        "fastest_ms": round(min(times), 4), "items_per_s": round(1e3 * batch / median, 1), "final_loss": step().item(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--modes", default="eager,compile")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--one", action="store_true", help="measure in this process, one value of each option")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(int(args.threads), args.dtypes, args.modes, args.steps, args.batch)), flush=True)
        return 0
    failed = 0
    for threads in args.threads.split(","):
        environment = dict(os.environ, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
        for dtype in args.dtypes.split(","):
            for mode in args.modes.split(","):
                command = [sys.executable, __file__, "--one", "--threads", threads, "--dtypes", dtype, "--modes", mode,
                           "--steps", str(args.steps), "--batch", str(args.batch)]
                failed |= subprocess.run(command, env=environment).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
