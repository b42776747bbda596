"""Searches the plan of a transformer: which of all plans is fastest, smallest, cheapest, and why.

`SearchSpace` says what is varied, `search_plans` returns a `PlanSearch`. Sits on
`perf.transformer`, which prices one plan. No torch.
"""

from paceline.perf.planner.result import PlanSearch
from paceline.perf.planner.search import search_plans
from paceline.perf.planner.space import SearchSpace

__all__ = ["PlanSearch", "SearchSpace", "search_plans"]
