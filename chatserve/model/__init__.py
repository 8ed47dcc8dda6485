"""Weights, attention, sampling and KV storage: executes the plans that `sched` makes.

Torch lives here. Must not know about users, sessions, text or scheduling.
"""
