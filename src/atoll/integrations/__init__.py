"""Atoll in training libraries: one module for each, which imports that library.

    atoll.integrations.transformers    AtollCallback for transformers.Trainer
    atoll.integrations.lightning       AtollLightningCallback for lightning.Trainer
    atoll.integrations.accelerate      attach, after accelerator.prepare

`examples/` has a program of at most 40 lines for each, and for a plain loop.
Invariants:
- No other package of Atoll imports this one.
- The library stays in charge of its loop: it is watched by its own callbacks and by the hooks of `Run.attach`.
"""
