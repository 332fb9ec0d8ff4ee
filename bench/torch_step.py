#!/usr/bin/env python3
"""PyTorch's time for the training step that `build/bin/mlp bench` and `build/bin/gpt bench` measure; bench/compare talks to it.

    ENV/bin/python3 bench/torch_step.py [--device cuda:0|cpu] [--dtype bf16|f32] [--clip X] '{"model": "gpt", "batch": 64, ...}'

A step is forward, loss, backward, clipping where asked for, and update, as a user of PyTorch writes them: random data that already lies on the
device, the fused AdamW with decay on matrices only, bf16 by autocast (f32 parameters, products in bf16). The model is the JSON object that
bench/compare has for it: the MLP, or the GPT in GPT-2's form, with biases and tanh GELU or without and erf (nanoGPT's).

It is told what to do by lines on its input, and answers each by one JSON object:

    prepare MODE      builds model and optimizer anew and warms up. eager; compile, reduce-overhead and max-autotune are torch.compile's own
                      (the last without its graphs); graph, graph-compile and graph-max-autotune capture the whole step in one CUDA graph
    measure SECONDS   steps for so long, by groups: the groups' times a step in ms, by CUDA events on a GPU, by the clock on a CPU

The caching of compiled code in files is left to the environment (TORCHINDUCTOR_CACHE_DIR).
"""
import argparse
import ctypes
import gc
import json
import statistics
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

COMPILED = {"compile": "default", "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune-no-cudagraphs"}


class MLP(nn.Module):
    def __init__(self, sizes, **_):
        super().__init__()
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, x, labels):
        return F.cross_entropy(self.layers(x).float(), labels)


class Block(nn.Module):
    def __init__(self, width, heads, dropout, bias):
        super().__init__()
        self.heads, self.dropout, self.gelu = heads, dropout, "tanh" if bias else "none"
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.c_fc, self.mlp_proj = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.c_proj(y.transpose(1, 2).reshape(b, t, c)), self.dropout)
        return x + F.dropout(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate=self.gelu)), self.dropout)


class GPT(nn.Module):
    def __init__(self, layers, heads, width, context, vocabulary, dropout, bias, **_):
        super().__init__()
        self.dropout = dropout
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, bias) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=bias)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = F.dropout(self.wte(ids) + self.wpe.weight, self.dropout)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # the head is tied
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def model_and_data(shape, device):
    batch = shape["batch"]
    if shape["model"] == "mlp":
        sizes = shape["sizes"]
        # With numbers from 0 to 1 its step takes 0.148 ms in place of 0.106 on an H200: what is learnt by heart leaves denormal moments.
        return MLP(**shape).to(device), (torch.randn(batch, sizes[0], device=device), torch.randint(0, sizes[-1], (batch,), device=device))
    tokens = [torch.randint(0, shape["vocabulary"], (batch, shape["context"]), device=device) for _ in range(2)]
    return GPT(**shape).to(device), tuple(tokens)


def make_optimizer(model, graph):
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    try:
        return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.99), fused=True, capturable=graph)
    except (RuntimeError, ValueError):  # an older PyTorch on a CPU
        return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.99))


class Peer:
    def __init__(self, shape, device, dtype, clip):
        self.shape, self.device, self.dtype, self.clip = shape, torch.device(device), dtype, clip
        self.gpu = self.device.type == "cuda"
        self.step = None

    def drop(self):
        """The mode before leaves nothing that the next one meets."""
        self.step = None
        torch._dynamo.reset()
        gc.collect()
        if self.gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def prepare(self, mode):
        self.drop()
        begin = time.perf_counter()
        torch.manual_seed(1)
        graph = mode.startswith("graph")
        if graph and not self.gpu:
            raise ValueError(f"{mode} needs a GPU")
        model, data = model_and_data(self.shape, self.device)
        optimizer = make_optimizer(model, graph)
        compiled = mode.removeprefix("graph").removeprefix("-")
        call = torch.compile(model, mode=COMPILED[compiled]) if compiled not in ("", "eager") else model

        def step():
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.dtype == "bf16"):
                loss = call(*data)
            loss.backward()
            if self.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss

        first = step().item()
        self.step = self.captured(step) if graph else step
        for _ in range(5):
            loss = self.step()
        return {"mode": mode, "params": sum(p.numel() for p in model.parameters()), "first_loss": first, "loss": loss.item(),
                "peak_bytes": torch.cuda.max_memory_allocated() if self.gpu else None, "prepare_s": round(time.perf_counter() - begin, 2)}

    def captured(self, step):
        """A whole step as one graph: backward and optimizer are warmed up on a stream of their own first."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()

        def replay():
            graph.replay()
            return loss

        replay.needs = step  # the model and what else lies where the graph reads
        return replay

    def group_ms(self, steps):
        if not self.gpu:
            begin = time.perf_counter()
            for _ in range(steps):
                self.step()
            return 1e3 * (time.perf_counter() - begin) / steps
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(steps):
            self.step()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / steps

    def measure(self, seconds):
        size = 10 if self.gpu else 1
        self.group_ms(size)  # clocks and caches after a pause
        groups, end = [], time.perf_counter() + seconds
        while len(groups) < 3 or time.perf_counter() < end:
            groups.append(self.group_ms(size))
        return {"step_ms": statistics.median(groups), "fastest_ms": min(groups), "slowest_ms": max(groups), "groups": len(groups), "group": size}


def library_version(name, function):
    """What the library that this process uses says of itself."""
    try:
        call = getattr(ctypes.CDLL(name), function)
        call.restype = ctypes.c_size_t
        return call()
    except (OSError, AttributeError):
        return None


def versions(gpu):
    known = {"torch": torch.__version__, "python": sys.version.split()[0]}
    if gpu:
        major = torch.version.cuda.split(".")[0]
        known |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                  "cublaslt": library_version(f"libcublasLt.so.{major}", "cublasLtGetVersion")}
    return known


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f32"])
    parser.add_argument("--threads", type=int, default=0, help="of the CPU; 0: PyTorch's choice")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradient; 0: any")
    parser.add_argument("shape", type=json.loads)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    peer = Peer(args.shape, args.device, args.dtype, args.clip)
    if peer.gpu:
        torch.cuda.set_device(peer.device)
    print(json.dumps(versions(peer.gpu)), flush=True)
    for line in sys.stdin:
        verb, value = line.split()
        try:
            answer = peer.prepare(value) if verb == "prepare" else peer.measure(float(value))
        except Exception as error:  # a mode that this PyTorch cannot do is a result, too
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
