"""Kernels of ChatServe, usable without the rest: imports torch, triton and numpy only.

The folder is not itself a package: an import package named `kernels` would shadow another library of that name.
"""
