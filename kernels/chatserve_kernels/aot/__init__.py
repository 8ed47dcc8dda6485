"""Ahead-of-time compilation on any machine: what each specialisation of a kernel needs of a multiprocessor.

`record` runs the launching halves of this package on tensors that only say that they lie on a GPU, and takes down what
Triton would compile for each launch. `families` are all ways to make `calls`, `cover` chooses among these, and `build`
makes the binaries. So what is compiled is what is dispatched, by the code that dispatches it.
"""
