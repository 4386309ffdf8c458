"""The scores that models are given."""

SCORES = {"plain": "plain", "bn_recalibrated": "BN recalibrated", "ema": "ema"}
"""Names of the scores of every model, and their headings in tables.

`plain`: the weights as trained. `bn_recalibrated`: the same weights with BatchNorm statistics recomputed from training
images. `ema`: the exponential moving average of the weights, with statistics recomputed for it.
"""

ALL_SCORES = {**SCORES, "as_published": "as published"}
"""All scores, including the one of recipes with `as_published.score`, see `PublishedOptions`.

`as_published`: the weights after the first step of the epoch, with BatchNorm statistics of raw training images.
"""
