#!/usr/bin/env python3
"""Golden values of two small GPTs in float64, made by PyTorch: gpt.txt beside this script.

    /usr/bin/python3 tests/golden/gpt.py        Debian 12's python3-torch, 1.13

Lines are as in mlp.py; tests/golden.h reads them. The networks are GPT-2's, with pre-norm blocks, causal attention,
learned positions and the token table again as head; weights of linear layers are (out, in), keys as published.

a: no biases, GELU by erf, 2 layers, 2 heads, width 8, context 6, vocabulary 11
b: biases, GELU by tanh, 1 layer, 3 heads, width 12, context 5, vocabulary 7

M.x  M.y  M.initial.KEY                     ids of a batch of 3 and the ids that follow them; what the rest starts from
M.loss  M.logits  M.gradient.KEY            of the first step
a.adamw.losses  a.adamw.norms  a.adamw.KEY  ten AdamW updates: losses and norms of the gradient before each, parameters
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


def first_step(g, name, size, seed):
    """Returns the parameters and what computes the loss from them."""
    torch.manual_seed(seed)
    parameters = draw_parameters(size)
    ids = torch.randint(0, size.vocabulary, (BATCH, size.context + 1))
    x, y = ids[:, :-1], ids[:, 1:]

    def loss_of():
        logits = logits_of(size, parameters, x)
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


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    main()
