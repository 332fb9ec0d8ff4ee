#!/usr/bin/env python3
"""PyTorch's time for the training step that `build/bin/mlp bench` and `build/bin/gpt bench` measure; bench/compare talks to it.

    ENV/bin/python3 bench/torch_step.py [--device cuda:0|cpu] [--dtype bf16|f32] [--clip X] '{"model": "gpt", "batch": 64, ...}'
    ENV/bin/torchrun --standalone --nproc-per-node N bench/torch_step.py --device cuda|cpu --strategy ddp|zero1|zero2|fsdp ...

A step is forward, loss, backward, clipping where asked for, and update, as a user of PyTorch writes them: random data that already lies on the
device, the fused AdamW with decay on matrices only, bf16 by autocast (f32 parameters, products in bf16). The model is the JSON object that
bench/compare has for it: the MLP; the GPT in GPT-2's form, with biases and tanh GELU or without and erf (nanoGPT's); or in Llama's.

Of several ranks each has a GPU and `batch` rows: ddp by DistributedDataParallel, whose gradients are views of its buckets; zero1 by that and
ZeroRedundancyOptimizer; fsdp by fully_shard of each block and of the rest, parameters gathered in bf16 and gradients reduced in f32; zero2 by the
same, what the forward gathered staying for the backward.

It is told what to do by lines on its input (of the first rank, which tells the others), and answers each by one JSON object:

    prepare MODE      builds model and optimizer anew and warms up. eager; compile, reduce-overhead and max-autotune are torch.compile's own
                      (the last without its graphs); graph, graph-compile and graph-max-autotune capture the whole step in one CUDA graph
    measure SECONDS   steps for so long, by groups: the groups' times a step in ms, by CUDA events on a GPU, by the clock on a CPU
    rest              gives its memory back; `prepare` must come again

The caching of compiled code in files is left to the environment (TORCHINDUCTOR_CACHE_DIR).
"""
import argparse
import ctypes
import datetime
import gc
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
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


def initialise(model):
    """Matrices of N(0, 0.02), norms of ones, biases of zeros; where ranks have parts, its part."""
    for name, p in model.named_parameters():
        local = p.to_local() if hasattr(p, "to_local") else p
        with torch.no_grad():
            local.normal_(0, 0.02) if p.dim() > 1 else local.fill_(0 if name.endswith("bias") else 1)


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


def turned(x, cos, sin):
    """Rotary positions of (B, heads, T, size): halves of a head turn together."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, kv_heads, hidden):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.input_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        b, t, c = x.shape
        y = self.input_norm(x)
        q, k, v = (p(y).view(b, t, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, layers, heads, kv_heads, width, hidden, context, vocabulary, theta, tied, **_):
        super().__init__()
        self.size, self.context, self.theta = width // heads, context, theta
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)
        initialise(self)

    def place(self, device, dtype):
        """Tables of the rotary positions, no part of the model's state. How long wavelengths are stretched costs no time."""
        rates = self.theta ** (-torch.arange(0, self.size, 2, device=device, dtype=torch.float32) / self.size)
        angles = torch.outer(torch.arange(self.context, device=device, dtype=torch.float32), rates)
        angles = torch.cat((angles, angles), dim=-1)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, ids, targets):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        x = self.norm(x)
        logits = F.linear(x, self.tokens.weight) if self.head is None else self.head(x)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.view(-1))


def make_model(shape):
    kind = MLP if shape["model"] == "mlp" else Llama if shape.get("form") == "llama" else GPT
    return kind(**shape)


def make_data(shape, device):
    batch = shape["batch"]
    if shape["model"] == "mlp":
        sizes = shape["sizes"]
        # With numbers from 0 to 1 its step takes 0.148 ms in place of 0.106 on an H200: what is learnt by heart leaves denormal moments.
        return torch.randn(batch, sizes[0], device=device), torch.randint(0, sizes[-1], (batch,), device=device)
    return tuple(torch.randint(0, shape["vocabulary"], (batch, shape["context"]), device=device) for _ in range(2))


def sharded_model(shape, device, dtype, keeps):
    """fully_shard. No rank ever has the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if dtype == "bf16" else MixedPrecisionPolicy()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device("meta"):
        model = make_model(shape)
    for part in [*getattr(model, "blocks", []), model]:
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=not keeps if part is not model else None)
    model.to_empty(device=device)
    initialise(model)
    return model


def make_optimizer(model, graph, zero):
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    groups = [g for g in groups if g["params"]]
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=1e-4, betas=(0.9, 0.99), fused=True)
    try:
        return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.99), fused=True, capturable=graph)
    except (RuntimeError, ValueError):  # an older PyTorch on a CPU
        return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.99))


class Ranks:
    """The processes that torchrun started. What they tell one another goes through their hosts, so that ranks that wait leave GPUs alone."""

    def __init__(self, device):
        self.rank, self.ranks, self.told = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), None
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" and self.ranks > 1 else torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.ranks > 1:
            gpu = self.device.type == "cuda"
            dist.init_process_group("nccl" if gpu else "gloo", device_id=self.device if gpu else None)
            self.told = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=1))

    def hear(self, value):
        """The first rank's value, on all."""
        if self.ranks == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.told, device=torch.device("cpu"))
        return box[0]

    def lines(self):
        while line := self.hear(sys.stdin.readline() if self.rank == 0 else None):
            yield line

    def say(self, answer):
        """The first rank's answer, unless another one has failed."""
        if self.ranks > 1:
            answers = [None] * self.ranks
            dist.all_gather_object(answers, answer, group=self.told)
            answer = next((a for a in answers if "error" in a), answer)
        if self.rank == 0:
            print(json.dumps(answer), flush=True)

    def close(self):
        """Ends the process where it is one of several: taking groups down in order may abort on one of their threads."""
        if self.ranks > 1:
            dist.barrier(group=self.told)  # the first rank's last word has come
            sys.stdout.flush()
            os._exit(0)


class Peer:
    def __init__(self, shape, ranks, strategy, dtype, clip):
        self.shape, self.ranks, self.strategy, self.dtype, self.clip = shape, ranks, strategy, dtype, clip
        self.device, self.gpu = ranks.device, ranks.device.type == "cuda"
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

    def make(self):
        """The model as the strategy has it, and whether products are in bf16 by autocast."""
        sharded = self.strategy in ("zero2", "fsdp")
        if sharded:
            model = sharded_model(self.shape, self.device, self.dtype, self.strategy == "zero2")
        else:
            model = make_model(self.shape).to(self.device)
        if hasattr(model, "place"):
            model.place(self.device, torch.bfloat16 if self.dtype == "bf16" else torch.float32)
        if self.strategy in ("ddp", "zero1"):
            model = nn.parallel.DistributedDataParallel(model, device_ids=[self.device.index] if self.gpu else None, gradient_as_bucket_view=True)
        return model, self.dtype == "bf16" and not sharded

    def rest(self):
        self.drop()
        return {}

    def prepare(self, mode):
        self.drop()
        begin = time.perf_counter()
        torch.manual_seed(1)
        graph = mode.startswith("graph")
        if graph and not self.gpu:
            raise ValueError(f"{mode} needs a GPU")
        model, casts = self.make()
        data = make_data(self.shape, self.device)
        optimizer = make_optimizer(model, graph, self.strategy == "zero1")
        compiled = mode.removeprefix("graph").removeprefix("-")
        call = torch.compile(model, mode=COMPILED[compiled]) if compiled not in ("", "eager") else model

        def step():
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=casts):
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
        ms = self.group_ms(size)  # clocks and caches after a pause
        if self.gpu:  # groups so long that what the GPU waits for where one begins is nothing beside them
            size = self.ranks.hear(max(size, round(50 / ms)))
        groups, end = [], time.perf_counter() + seconds
        while self.ranks.hear(len(groups) < 3 or time.perf_counter() < end):
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
                  "nccl": ".".join(str(n) for n in torch.cuda.nccl.version()), "cublaslt": library_version(f"libcublasLt.so.{major}", "cublasLtGetVersion")}
    return known


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="cpu, cuda:K, or of several ranks cuda: each has the GPU of its number")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f32"])
    parser.add_argument("--strategy", default="single", choices=["single", "ddp", "zero1", "zero2", "fsdp"])
    parser.add_argument("--threads", type=int, default=0, help="of the CPU, a rank; 0: PyTorch's choice")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradient; 0: any")
    parser.add_argument("shape", type=json.loads)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    ranks = Ranks(args.device)
    peer = Peer(args.shape, ranks, args.strategy, args.dtype, args.clip)
    if ranks.rank == 0:
        print(json.dumps(versions(peer.gpu)), flush=True)
    for line in ranks.lines():
        verb, _, value = line.strip().partition(" ")
        try:
            answer = peer.prepare(value) if verb == "prepare" else peer.measure(float(value)) if verb == "measure" else peer.rest()
        except Exception as error:  # a mode that this PyTorch cannot do is a result, too
            answer = {"error": f"{type(error).__name__}: {error}"[:400]}
        ranks.say(answer)
    ranks.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
