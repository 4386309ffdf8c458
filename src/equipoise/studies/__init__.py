"""Studies: arms x seeds of one recipe, their results, and verdicts on claims about them."""
