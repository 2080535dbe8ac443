"""How samples become rows and rows become steps; each scheme is one file, and `mmds.planner.RunPlan` runs any of them."""

from mmds.schemes.cost import CostScheme
from mmds.schemes.resolution_bucket import ResolutionBucket
from mmds.schemes.scheme import Scheme, too_few, too_large
from mmds.schemes.token_budget import TokenBudget

SCHEMES: dict[str, type[Scheme]] = {
    "cost": CostScheme,
    "token_budget": TokenBudget,
    "resolution_bucket": ResolutionBucket,
}
"""By their names in `mmds.planner.scheme`."""

__all__ = ["SCHEMES", "CostScheme", "ResolutionBucket", "Scheme", "TokenBudget", "too_few", "too_large"]
