#!/usr/bin/env python3
"""PyTorch's time for a token that `build/bin/gpt sample` draws: the peer that Tandem is held against.

    python3 -m venv ENV && ENV/bin/pip install torch numpy          (a current one)
    ENV/bin/python3 bench/torch_sample.py [--size small,10m] [--threads 1,2] [--dtypes f32,bf16] [--modes eager,compile]

A decoder in GPT-2's form with initial weights, one sequence, under inference_mode: keys and values in caches made once, a row a token,
scaled_dot_product_attention over what the caches hold, and the next token by multinomial on the softmax of the logits, which the host
reads, as one who prints it does. bf16 is the whole model in bf16, as one samples, not autocast, which would cast the weights at each token.
Each configuration runs in a process of its own, so that the number of threads is set before anything starts them; nothing else should run
meanwhile. One JSON object a line: tokens a second, the first of them left out as a warm-up, over --tokens of them; the cache fills as far.
"""
import argparse
import json
import os
import subprocess
import sys
import time

SIZES = {  # layers, heads, width, context, vocabulary
    "small": (4, 4, 128, 256, 65),
    "10m": (6, 6, 384, 256, 65),
    "124m": (12, 12, 768, 1024, 50304),
}


def decoder(size, dtype):
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    layers, heads, width, context, vocabulary = SIZES[size]
    depth = width // heads

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.register_buffer("keys", torch.zeros(1, heads, context, depth))
            self.register_buffer("values", torch.zeros(1, heads, context, depth))

        def attend(self, x, position, mask):
            q, k, v = self.attn(x).view(1, 1, 3, heads, depth).permute(2, 0, 3, 1, 4)
            if mask is None:  # eager: as many rows as there are
                self.keys[:, :, position : position + 1] = k
                self.values[:, :, position : position + 1] = v
                y = F.scaled_dot_product_attention(q, self.keys[:, :, : position + 1], self.values[:, :, : position + 1])
            else:  # compiled: one shape, the rows behind are masked
                self.keys.index_copy_(2, position, k)
                self.values.index_copy_(2, position, v)
                y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask)
            return self.proj(y.transpose(1, 2).reshape(1, 1, width))

        def forward(self, x, position, mask):
            x = x + self.attend(self.ln_1(x), position, mask)
            return x + self.out(F.gelu(self.fc(self.ln_2(x))))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.blocks, self.ln_f = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(width)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, id, position, mask):
            place = self.wpe.weight[position] if mask is None else self.wpe(position)
            x = self.wte(id).view(1, 1, width) + place.view(1, 1, width)
            for block in self.blocks:
                x = block(x, position, mask)
            return F.linear(self.ln_f(x), self.wte.weight).view(vocabulary)

    return Decoder().eval().to(dtype)


def measure(size, threads, dtype, mode, tokens):
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(1)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    model, context, compiled = decoder(size, kind), SIZES[size][3], mode == "compile"
    call = torch.compile(model) if compiled else model
    places = torch.arange(context)

    def draw(id, position):
        mask = (places <= position).view(1, 1, 1, context) if compiled else None
        logits = call(id, places[position : position + 1] if compiled else position, mask)
        id = torch.multinomial(torch.softmax(logits.float(), -1), 1)
        return id, id.item()

    with torch.inference_mode():
        first = torch.zeros(1, dtype=torch.long)
        for warm in range(min(20, context)):
            draw(first, warm)
        left, begin, id = tokens, time.perf_counter(), first
        while left > 0:  # one context after another
            for position in range(min(left, context)):
                id, _ = draw(id, position)
            left -= min(left, context)
        rate = tokens / (time.perf_counter() - begin)
    return {"peer": "torch", "version": torch.__version__, "model": "gpt", "size": size, "mode": mode, "dtype": dtype, "threads": threads,
            "tokens": tokens, "tokens_per_s": round(rate, 1)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="small,10m")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--modes", default="eager,compile")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--one", action="store_true", help="measure in this process, one value of each option")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.size, int(args.threads), args.dtypes, args.modes, args.tokens)), flush=True)
        return 0
    failed = 0
    for size in args.size.split(","):
        for threads in args.threads.split(","):
            environment = dict(os.environ, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
            for dtype in args.dtypes.split(","):
                for mode in args.modes.split(","):
                    command = [sys.executable, __file__, "--one", "--size", size, "--threads", threads, "--dtypes", dtype,
                               "--modes", mode, "--tokens", str(args.tokens)]
                    failed |= subprocess.run(command, env=environment).returncode
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
