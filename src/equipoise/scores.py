"""The scores that every model is given."""

SCORES = {"plain": "plain", "bn_recalibrated": "BN recalibrated", "ema": "ema"}
"""Names of the scores, and their headings in tables.

`plain`: the weights as trained. `bn_recalibrated`: the same weights with BatchNorm statistics recomputed from training
images. `ema`: the exponential moving average of the weights, with statistics recomputed for it.
"""
