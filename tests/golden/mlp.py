#!/usr/bin/env python3
"""Golden values of the MLP in float64, made by PyTorch: classifier.txt and regression.txt beside this script.

    /usr/bin/python3 tests/golden/mlp.py        Debian 12's python3-torch, 1.13

Each line is one array: its name, its shape as sizes with commas ("-" for a scalar), and its values in row-major order,
each the shortest decimal that reads back to the same double. tests/golden.h reads them.

classifier.txt: 20-16-16-5 with ReLU, keys net.{0,2,4}.{weight,bias}, cross-entropy over a batch of 12.
    x  labels  initial.KEY                   what the rest starts from
    loss  logits  gradient.KEY               of the first step
    adamw.losses  adamw.KEY                  losses before each of ten AdamW updates, parameters after them
    clipped.losses  clipped.norms  clipped.KEY   the same, gradients first clipped to a global norm of 0.5 by PyTorch's
                                             formula: multiplied by min(1, 0.5 / (norm + 1e-6)); norms before clipping
regression.txt: 10-64-64-1 with ReLU, keys net.{0,3,6}.{weight,bias} (dropout off), MSE over a batch of 16.
    x  y  initial.KEY  loss  outputs  adam.losses  adam.KEY       ten Adam updates, lr 1e-3

Inputs and initial parameters are drawn once and rounded to a few decimals, so that the files stay small.
"""
import os

import torch
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS = 10


def rounded(t, decimals):
    """The doubles nearest to decimals of that many digits, so that they print short."""
    return torch.tensor([round(v, decimals) for v in t.flatten().tolist()]).reshape(t.shape)


class Golden:
    def __init__(self, name):
        self.path = os.path.join(HERE, name)
        self.lines = []

    def put(self, name, t):
        t = t.detach() if torch.is_tensor(t) else torch.tensor(t)
        shape = ",".join(map(str, t.shape)) or "-"
        values = (repr(v) for v in t.flatten().tolist())
        self.lines.append(" ".join([name, shape, *values]))

    def put_parameters(self, prefix, net):
        for key, p in net.named_parameters():
            self.put(f"{prefix}.net.{key}", p)

    def write(self):
        with open(self.path, "w") as f:
            f.write("\n".join(self.lines) + "\n")


def draw_parameters(net):
    """As nn.Linear starts: uniform in +-1/sqrt(in)."""
    with torch.no_grad():
        for layer in net:
            if isinstance(layer, nn.Linear):
                bound = layer.in_features ** -0.5
                for p in (layer.weight, layer.bias):
                    p.copy_(rounded((2 * torch.rand(p.shape) - 1) * bound, 4))
    return {key: p.detach().clone() for key, p in net.named_parameters()}


def train(net, initial, loss_of, make_optimizer, clip=None):
    """Losses before each update, and norms before clipping."""
    net.load_state_dict(initial)
    optimizer = make_optimizer(net.parameters())
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(net.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def classifier():
    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    initial = draw_parameters(net)
    x = rounded(torch.randn(12, 20), 3)
    labels = torch.randint(0, 5, (12,))

    def loss_of(net):
        return nn.functional.cross_entropy(net(x), labels)

    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)

    g = Golden("classifier.txt")
    g.put("x", x)
    g.put("labels", labels)
    g.put_parameters("initial", net)
    loss = loss_of(net)
    loss.backward()
    g.put("loss", loss)
    g.put("logits", net(x))
    for key, p in net.named_parameters():
        g.put(f"gradient.net.{key}", p.grad)
    losses, _ = train(net, initial, loss_of, adamw)
    g.put("adamw.losses", losses)
    g.put_parameters("adamw", net)
    losses, norms = train(net, initial, loss_of, adamw, clip=0.5)
    assert sum(n > 0.5 for n in norms) == 6, "some steps are clipped and some are not"
    g.put("clipped.losses", losses)
    g.put("clipped.norms", norms)
    g.put_parameters("clipped", net)
    g.write()


def regression():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2),
                        nn.Linear(64, 1)).eval()
    initial = draw_parameters(net)
    assert sum(p.numel() for p in net.parameters()) == 4929
    x = rounded(torch.randn(16, 10), 3)
    y = rounded(torch.sin(x.sum(1, keepdim=True)), 3)

    def loss_of(net):
        return nn.functional.mse_loss(net(x), y)

    g = Golden("regression.txt")
    g.put("x", x)
    g.put("y", y)
    g.put_parameters("initial", net)
    g.put("loss", loss_of(net))
    g.put("outputs", net(x))
    losses, _ = train(net, initial, loss_of, lambda parameters: torch.optim.Adam(parameters, lr=1e-3))
    g.put("adam.losses", losses)
    g.put_parameters("adam", net)
    g.write()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    classifier()
    regression()
