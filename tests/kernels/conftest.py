"""Kernels run under Triton's interpreter, which must be chosen before they are imported; on a machine with a GPU, as
compiled; and not at all where there is no Triton, which is made for Linux only."""

import importlib.util
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
