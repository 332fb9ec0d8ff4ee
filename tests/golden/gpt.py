#!/usr/bin/env python3
"""Golden values of four small GPTs in float64, made by PyTorch: gpt.txt and gpt_llama.txt beside this script.

    /usr/bin/python3 tests/golden/gpt.py        Debian 12's python3-torch, 1.13

Lines are as in mlp.py; tests/golden.h reads them. All have pre-norm blocks and causal attention; weights of linear
layers are (out, in), keys as published.

gpt.txt: GPT-2's form, learned positions and the token table again as head
a: no biases, GELU by erf, 2 layers, 2 heads, width 8, context 6, vocabulary 11
b: biases, GELU by tanh, 1 layer, 3 heads, width 12, context 5, vocabulary 7

gpt_llama.txt: Llama's form, RMS norms, rotary positions on halves of heads, SwiGLU
c: 2 layers, 4 heads on 2 of keys and values, width 24, hidden 20, context 7, vocabulary 13, the token table again as head
d: 1 layer, 3 heads on 1, width 24, hidden 17, context 9, vocabulary 10, a head of its own, theta 810000 and wavelengths
   stretched by 8 as in Llama 3.1: of the 4 pairs of a head two keep theirs, one is between, one is stretched in full

M.x  M.y  M.initial.KEY                     ids of a batch of 3 and the ids that follow them; what the rest starts from
M.loss  M.logits  M.gradient.KEY            of the first step
M.adamw.losses  M.adamw.norms  M.adamw.KEY  of a and c: ten AdamW updates: losses and norms of the gradient before each, parameters
                                            after them; lr 1e-3, betas 0.9 and 0.99, eps 1e-8, decay 0.1 on matrices
                                            only, gradients first clipped to a global norm of 1 by PyTorch's formula

Initial parameters are drawn once and rounded to a few decimals, so that the file stays small. They are larger than
GPT-2's, so that attention is far from uniform and no gradient is near 0.
"""
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from mlp import STEPS, Golden, rounded

BATCH = 3


@dataclass
class Size:
    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    has_bias: bool
    gelu: str


@dataclass
class LlamaSize:
    layers: int
    heads: int
    kv_heads: int
    width: int
    hidden: int
    context: int
    vocabulary: int
    tied: bool
    theta: float
    factor: float


def draw_parameters(size):
    """By key, in the order of the network."""
    parameters = {}

    def draw(key, *shape, around=0.0, deviation=0.3):
        values = rounded(around + deviation * torch.randn(shape), 3)
        parameters[key] = values.requires_grad_()

    def norm(key):
        draw(f"{key}.weight", size.width, around=1.0, deviation=0.2)
        if size.has_bias:
            draw(f"{key}.bias", size.width)

    def linear(key, inputs, outputs):
        draw(f"{key}.weight", outputs, inputs)
        if size.has_bias:
            draw(f"{key}.bias", outputs)

    draw("wte.weight", size.vocabulary, size.width)
    draw("wpe.weight", size.context, size.width)
    for layer in range(size.layers):
        at = f"h.{layer}"
        norm(f"{at}.ln_1")
        linear(f"{at}.attn.c_attn", size.width, 3 * size.width)
        linear(f"{at}.attn.c_proj", size.width, size.width)
        norm(f"{at}.ln_2")
        linear(f"{at}.mlp.c_fc", size.width, 4 * size.width)
        linear(f"{at}.mlp.c_proj", 4 * size.width, size.width)
    norm("ln_f")
    return parameters


def logits_of(size, parameters, x):
    def norm(key, h):
        return functional.layer_norm(h, (size.width,), parameters[f"{key}.weight"], parameters.get(f"{key}.bias"), 1e-5)

    def linear(key, h):
        return functional.linear(h, parameters[f"{key}.weight"], parameters.get(f"{key}.bias"))

    def attention(at, h):
        batch, length, width = h.shape
        q, k, v = (part.view(batch, length, size.heads, width // size.heads).transpose(1, 2)
                   for part in linear(f"{at}.c_attn", h).split(width, dim=2))
        scores = q @ k.transpose(2, 3) / math.sqrt(width // size.heads)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=3)
        return linear(f"{at}.c_proj", (weights @ v).transpose(1, 2).reshape(batch, length, width))

    def feed_forward(at, h):
        return linear(f"{at}.c_proj", functional.gelu(linear(f"{at}.c_fc", h), approximate=size.gelu))

    h = functional.embedding(x, parameters["wte.weight"]) + parameters["wpe.weight"][:x.shape[1]]
    for layer in range(size.layers):
        at = f"h.{layer}"
        h = h + attention(f"{at}.attn", norm(f"{at}.ln_1", h))
        h = h + feed_forward(f"{at}.mlp", norm(f"{at}.ln_2", h))
    return norm("ln_f", h) @ parameters["wte.weight"].T


def draw_llama(size):
    parameters = {}

    def draw(key, *shape, around=0.0, deviation=0.3):
        parameters[f"{key}.weight"] = rounded(around + deviation * torch.randn(shape), 3).requires_grad_()

    head = size.width // size.heads
    draw("model.embed_tokens", size.vocabulary, size.width)
    for layer in range(size.layers):
        at = f"model.layers.{layer}"
        draw(f"{at}.input_layernorm", size.width, around=1.0, deviation=0.2)
        draw(f"{at}.self_attn.q_proj", size.heads * head, size.width)
        draw(f"{at}.self_attn.k_proj", size.kv_heads * head, size.width)
        draw(f"{at}.self_attn.v_proj", size.kv_heads * head, size.width)
        draw(f"{at}.self_attn.o_proj", size.width, size.heads * head)
        draw(f"{at}.post_attention_layernorm", size.width, around=1.0, deviation=0.2)
        draw(f"{at}.mlp.gate_proj", size.hidden, size.width)
        draw(f"{at}.mlp.up_proj", size.hidden, size.width)
        draw(f"{at}.mlp.down_proj", size.width, size.hidden)
    draw("model.norm", size.width, around=1.0, deviation=0.2)
    if not size.tied:
        draw("lm_head", size.vocabulary, size.width)
    return parameters


def frequencies(size):
    """Radians a position of each pair; Llama 3.1's stretch is written as in its report: low 1, high 4, context 8192."""
    head = size.width // size.heads
    f = size.theta ** (-torch.arange(0, head, 2) / head)
    if not size.factor:
        return f
    wavelength = 2 * math.pi / f
    between = (8192 / wavelength - 1) / (4 - 1)
    stretched = torch.where(wavelength > 8192 / 1, f / size.factor, f)
    is_between = (wavelength <= 8192 / 1) & (wavelength >= 8192 / 4)
    assert is_between.sum() == 1 and (wavelength > 8192).sum() == 1, "all three kinds of wavelength"
    return torch.where(is_between, (1 - between) * f / size.factor + between * f, stretched)


def llama_logits(size, parameters, x):
    angles = torch.arange(x.shape[1])[:, None] * frequencies(size)[None, :]

    def linear(key, h):
        return functional.linear(h, parameters[f"{key}.weight"])

    def norm(key, h):
        return h / (h.pow(2).mean(2, keepdim=True) + 1e-5).sqrt() * parameters[f"{key}.weight"]

    def turned(h):
        first, second = h.chunk(2, dim=3)
        return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), 3)

    def heads(h, count):
        return h.view(*h.shape[:2], count, size.width // size.heads).transpose(1, 2)

    def attention(at, h):
        q = turned(heads(linear(f"{at}.q_proj", h), size.heads))
        k = turned(heads(linear(f"{at}.k_proj", h), size.kv_heads)).repeat_interleave(size.heads // size.kv_heads, 1)
        v = heads(linear(f"{at}.v_proj", h), size.kv_heads).repeat_interleave(size.heads // size.kv_heads, 1)
        scores = q @ k.transpose(2, 3) / math.sqrt(size.width // size.heads)
        later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=3)
        return linear(f"{at}.o_proj", (weights @ v).transpose(1, 2).reshape(h.shape))

    def feed_forward(at, h):
        return linear(f"{at}.down_proj", functional.silu(linear(f"{at}.gate_proj", h)) * linear(f"{at}.up_proj", h))

    h = functional.embedding(x, parameters["model.embed_tokens.weight"])
    for layer in range(size.layers):
        at = f"model.layers.{layer}"
        h = h + attention(f"{at}.self_attn", norm(f"{at}.input_layernorm", h))
        h = h + feed_forward(f"{at}.mlp", norm(f"{at}.post_attention_layernorm", h))
    return linear("model.embed_tokens" if size.tied else "lm_head", norm("model.norm", h))


def first_step(g, name, size, seed):
    """Returns the parameters and what computes the loss from them."""
    torch.manual_seed(seed)
    is_llama = isinstance(size, LlamaSize)
    parameters = draw_llama(size) if is_llama else draw_parameters(size)
    ids = torch.randint(0, size.vocabulary, (BATCH, size.context + 1))
    x, y = ids[:, :-1], ids[:, 1:]

    def loss_of():
        logits = llama_logits(size, parameters, x) if is_llama else logits_of(size, parameters, x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    g.put(f"{name}.x", x)
    g.put(f"{name}.y", y)
    for key, p in parameters.items():
        g.put(f"{name}.initial.{key}", p)
    logits, loss = loss_of()
    loss.backward()
    g.put(f"{name}.loss", loss)
    g.put(f"{name}.logits", logits)
    for key, p in parameters.items():
        g.put(f"{name}.gradient.{key}", p.grad)
    return parameters, loss_of


def ten_updates(g, name, parameters, loss_of):
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.99), eps=1e-8)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        _, loss = loss_of()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(parameters.values(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    assert all(n > 1 for n in norms), "every step is clipped"
    g.put(f"{name}.adamw.losses", losses)
    g.put(f"{name}.adamw.norms", norms)
    for key, p in parameters.items():
        g.put(f"{name}.adamw.{key}", p)


def main():
    g = Golden("gpt.txt")
    a = Size(layers=2, heads=2, width=8, context=6, vocabulary=11, has_bias=False, gelu="none")
    b = Size(layers=1, heads=3, width=12, context=5, vocabulary=7, has_bias=True, gelu="tanh")
    parameters, loss_of = first_step(g, "a", a, seed=7)
    ten_updates(g, "a", parameters, loss_of)
    first_step(g, "b", b, seed=8)
    g.write()

    g = Golden("gpt_llama.txt")
    c = LlamaSize(layers=2, heads=4, kv_heads=2, width=24, hidden=20, context=7, vocabulary=13, tied=True, theta=10000.0,
                  factor=0.0)
    d = LlamaSize(layers=1, heads=3, kv_heads=1, width=24, hidden=17, context=9, vocabulary=10, tied=False,
                  theta=810000.0, factor=8.0)
    parameters, loss_of = first_step(g, "c", c, seed=9)
    ten_updates(g, "c", parameters, loss_of)
    first_step(g, "d", d, seed=10)
    g.write()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    main()
