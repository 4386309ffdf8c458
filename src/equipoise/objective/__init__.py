"""What is minimised: standard and adversarial objectives, and the attacks they train and are judged with."""

from equipoise.catalogue import Catalogue
from equipoise.objective.at import AdversarialTraining
from equipoise.objective.attack import PGD, fgsm
from equipoise.objective.autoattack import autoattack
from equipoise.objective.base import Objective
from equipoise.objective.mart import Mart
from equipoise.objective.masking import GradientMaskingWarning
from equipoise.objective.mixed import Mixed
from equipoise.objective.robust import ATTACKS, RobustResult, robust_accuracy
from equipoise.objective.standard import Standard
from equipoise.objective.trades import Trades

OBJECTIVES: Catalogue[type[Objective]] = Catalogue(
    "objective",
    {"standard": Standard, "at": AdversarialTraining, "trades": Trades, "mart": Mart, "mixed": Mixed},
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
