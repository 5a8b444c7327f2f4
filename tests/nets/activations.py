"""Torch's activations by our names, which tests of layers compare with."""

import torch
from torch.nn import functional

FUNCTIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "elu": functional.elu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
