"""Layers in torch, which tests of ours compare with: activations by our names, and hidden
layers by the names of their weights."""

import torch
from torch.nn import functional

FUNCTIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": functional.elu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def hidden_layers(x, weights, activation, name="hidden"):
    """What so many layers make of x; their parts [...] stand in `weights`."""
    i = 0
    while f"{name}.{i}.weight" in weights:
        x = x @ weights[f"{name}.{i}.weight"] + weights[f"{name}.{i}.bias"]
        if f"{name}.{i}.scale" in weights:
            x = functional.layer_norm(x, x.shape[-1:])
            x = x * weights[f"{name}.{i}.scale"] + weights[f"{name}.{i}.shift"]
        x = FUNCTIONS[activation](x)
        i += 1
    return x
