"""Weights, attention, sampling and KV storage: executes the plans that `sched` makes.

Torch lives here. Must not know about users, sessions, text or scheduling.
"""

import os

# Read once, when torch loads its OpenMP runtime. Threads that spin while they wait for each other lose their processor
# to whatever else runs: measured with both cores busy, a token took 690 ms with spinning and 99 ms without.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# GNU's runtime may spin for a microsecond or so first: a quiet machine's token takes 29 ms instead of 33 in its matrix
# products (27 with endless spinning), and a busy one's about the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
