"""Standard and adversarial objectives, and the attacks for training and evaluation."""

from equipoise.catalogue import Catalogue
from equipoise.objectives.adversarial_training import AdversarialTraining
from equipoise.objectives.attack import PGD, fgsm
from equipoise.objectives.autoattack import autoattack
from equipoise.objectives.gradient_masking import GradientMaskingWarning
from equipoise.objectives.mart import Mart
from equipoise.objectives.mixed import Mixed
from equipoise.objectives.objective import Objective
from equipoise.objectives.robust_accuracy import ATTACKS, RobustResult, robust_accuracy
from equipoise.objectives.standard import Standard
from equipoise.objectives.trades import Trades

OBJECTIVES: Catalogue[type[Objective]] = Catalogue(
    "objective",
    {"standard": Standard, "at": AdversarialTraining, "trades": Trades, "mart": Mart, "mixed": Mixed},
    group="objectives",
    base=Objective,
)

__all__ = [
    "ATTACKS",
    "OBJECTIVES",
    "PGD",
    "AdversarialTraining",
    "GradientMaskingWarning",
    "Mart",
    "Mixed",
    "Objective",
    "RobustResult",
    "Standard",
    "Trades",
    "autoattack",
    "fgsm",
    "robust_accuracy",
]
