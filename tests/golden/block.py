#!/usr/bin/env python3
"""Golden values of a classifier of vectors with post-norm transformer blocks, in float64, made by PyTorch: block.txt beside
this script.

    /usr/bin/python3 tests/golden/block.py        Debian 12's python3-torch, 1.13

Public demos of FSDP use this form: x (B, 512) as sequences of length 1 -> Linear(512, 512) -> 4 blocks
x = LN(x + MHA(x)), x = LN(x + W2 GELU(W1 x)) of 8 heads and 2048 hidden -> LayerNorm -> mean over positions ->
Linear(512, 10), cross-entropy; 12,878,346 parameters.

Inputs and parameters are a formula (element()), so that they need no file: array number n of parameters in the order of
their creation, x before all of them as number 0. Lines are as in mlp.py.

logits  norms     of the first step: logits (4, 10), and the 2-norm of each parameter's gradient, in order
losses            before each of three AdamW updates, lr 1e-3, decay 0.01
"""
import torch
from torch import nn
from torch.nn import functional

from mlp import Golden

ROWS, WIDTH, HIDDEN, HEADS, LAYERS, CLASSES = 4, 512, 2048, 8, 4, 10
STEPS = 3


def element(number, shape, scale):
    """(u / 2^32 - 1/2) scale, u = 2654435761 i + 40503 number modulo 2^32, its bits folded once."""
    i = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    u = (i * 2654435761 + number * 40503) & 0xFFFFFFFF
    u = ((u ^ (u >> 15)) * 2246822519) & 0xFFFFFFFF
    return ((u.double() / 2.0**32 - 0.5) * scale).reshape(shape)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x = self.norm_1(x + self.attention(x, x, x, need_weights=False)[0])
        return self.norm_2(x + self.down(functional.gelu(self.up(x))))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.input = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.input(x.unsqueeze(1))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x).mean(1))


def main():
    torch.set_default_dtype(torch.float64)
    net = Classifier()
    with torch.no_grad():
        for number, (key, p) in enumerate(net.named_parameters()):
            is_scale = "norm" in key and key.endswith("weight")
            p.copy_(element(number + 1, p.shape, 0.125) + (1 if is_scale else 0))
    assert sum(p.numel() for p in net.parameters()) == 12878346
    x, labels = element(0, (ROWS, WIDTH), 4.0), torch.arange(ROWS) * 3 % CLASSES
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    golden, losses = Golden("block.txt"), []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = net(x)
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        if step == 0:
            golden.put("logits", logits)
            golden.put("norms", torch.stack([p.grad.norm() for p in net.parameters()]))
        optimizer.step()
        losses.append(loss.item())
    golden.put("losses", losses)
    golden.write()
    for key, _ in net.named_parameters():
        print(key)


if __name__ == "__main__":
    main()
