"""Kernels run under Triton's interpreter, which must be chosen before they are imported; on a machine with a GPU, as
compiled."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
